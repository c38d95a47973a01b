"""Attention views: what they refuse, and that no token can break the page that carries them."""

import html
import json
import re

import numpy as np
import pytest
import torch

from lenprobe.views import MAX_TOKENS, AttentionView, attention_view, page_of, script_html

NASTY = ["</script>", "<b>bold</b>", "<!--", "&amp;", '"quoted"', "'", "\u2028", "é", " ", ""]


def patterns(heads: int, n: int) -> np.ndarray:
    """Uniform causal attention."""
    visible = np.tri(n)
    return np.repeat((visible / visible.sum(-1, keepdims=True))[None], heads, axis=0)


def props_of(view: AttentionView) -> dict:
    return json.loads(view.props)


def test_tokens_cannot_leave_the_script() -> None:
    page = page_of({"<i>title</i>": attention_view(patterns(1, len(NASTY)), NASTY)})
    body = page[page.index("<body>") :]
    assert "<b>" not in body and "<!--" not in body and "<i>" not in body
    assert body.count("<script>") == body.count("</script>") == 1
    data = re.search(r"CircuitsVis\.AttentionPattern, (.*)\)\)$", body, re.MULTILINE)
    assert data is not None
    assert json.loads(data.group(1))["tokens"] == NASTY


def test_one_copy_of_the_script_however_many_views() -> None:
    view = attention_view(patterns(2, 4), list("abcd"))
    page = page_of({str(index): view for index in range(5)})
    assert page.count("DecompressionStream") == 1
    assert page.count("CircuitsVis.render(") == 5
    assert len(page) < 600_000


def test_the_script_is_circuitsvis_own_and_asks_for_no_other_file() -> None:
    import base64
    import gzip

    packed = re.search(r'atob\("([^"]+)"\)', script_html())
    assert packed is not None
    source = gzip.decompress(base64.b64decode(packed.group(1))).decode()
    assert source.lstrip().startswith('"use strict";var CircuitsVis=')
    assert "sourceMappingURL" not in source


def test_a_page_names_no_address() -> None:
    page = page_of({"": attention_view(patterns(1, 3), list("abc"))})
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", page)


def test_the_notebook_frame_is_a_whole_page_in_one_attribute() -> None:
    shown = attention_view(patterns(1, len(NASTY)), NASTY)._repr_html_()
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*" title="[^"]*">.*</iframe>', shown)
    assert frame is not None
    page = html.unescape(frame.group(1))
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
    assert len(shown) < 600_000


def test_what_is_drawn_is_what_was_given() -> None:
    values = patterns(3, 5)
    view = attention_view(torch.tensor(values, dtype=torch.float32), range(5), head_names="abc")
    props = props_of(view)
    np.testing.assert_allclose(np.array(props["attention"]), values, atol=5.1e-5)
    assert props["attentionHeadNames"] == ["a", "b", "c"]
    assert props["tokens"] == ["0", "1", "2", "3", "4"]
    assert props["maskUpperTri"] is True and props["maxValue"] == 1.0


def test_masked_logits_are_empty_and_colours_reach_the_largest() -> None:
    logits = np.where(np.tri(4) > 0, np.arange(16.0).reshape(4, 4) - 20, -np.inf)[None]
    props = props_of(attention_view(logits, list("abcd")))
    assert props["maxValue"] == 20.0 and props["minValue"] == -20.0
    assert props["attention"][0][3] == 0.0


def test_bfloat16_with_gradient() -> None:
    weights = torch.tensor(patterns(1, 3), dtype=torch.bfloat16, requires_grad=True)
    assert "AttentionView(1 head, 3 tokens)" == repr(attention_view(weights, list("abc")))


def test_save_html(tmp_path) -> None:
    path = attention_view(patterns(1, 3), list("abc"), head_names=["<one>"]).save_html(
        tmp_path / "view.html", title="A & B"
    )
    text = path.read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in text and "<h3>&lt;one&gt;</h3>" in text


@pytest.mark.parametrize(
    ("values", "tokens", "names", "message"),
    [
        (patterns(1, MAX_TOKENS + 1), range(MAX_TOKENS + 1), None, r"takes 1 to 128; show a part"),
        (patterns(1, 3), [], None, r"0 entries"),
        (patterns(1, 3), list("ab"), None, r"shape \(1, 3, 3\), expected \[head, query, key\]"),
        (np.full((1, 2, 2), np.nan), list("ab"), None, "NaN"),
        (np.full((1, 2, 2), np.inf), list("ab"), None, r"\+inf"),
        (patterns(2, 2), list("ab"), ["one"], "1 entries for 2 heads"),
    ],
)
def test_refusals_say_what_to_do(values, tokens, names, message) -> None:
    with pytest.raises(ValueError, match=message):
        attention_view(values, tokens, head_names=names)
