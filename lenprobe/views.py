"""Attention patterns to look at and hover over: circuitsvis, with no network at all.

circuitsvis itself asks google.com whether it is online and then loads its script from a CDN; it
also puts tokens into the page as they are, so that a token ``</script>`` breaks it. Here its
bundled script travels inside the page, compressed (0.5 MB instead of 1.3 MB) and once, however
many views the page holds, and data is escaped.

- In a notebook a view shows itself in a frame of its own, which is a whole page: outputs can be
  cleared, moved and saved in any order. That is 0.5 MB a view in the saved notebook.
- ``save_html`` writes one view as a page; ``page_of`` puts many on one.
- ``script_html`` once and ``fragment`` for each view build a page of your own.
"""

import base64
import gzip
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

MAX_TOKENS = 128
"""Longest view. Drawing grows with the square: 128 tokens take seconds, 512 never appear."""

_DECIMALS = 4

_STYLE = """<style>
.attention-view { max-width: 660px; padding: 0 22px 0 16px; font-family: system-ui, sans-serif; }
.attention-view h2 { font-size: 0.9rem; margin: 0; }
.attention-view h3 { font-size: 0.9rem; font-weight: 600; }
.attention-view h4 { font-size: 0.65rem; font-weight: 600; line-height: 1.2; }
</style>"""

_LOADER = """<script>
window.circuitsVisReady ??= (async () => {
  const packed = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
})();
</script>"""

_FRAGMENT = """<div class="attention-view">%s</div>
<script>
{
  const box = document.currentScript.previousElementSibling.lastElementChild;
  box.id = "attention-view-" + document.querySelectorAll(".attention-view").length;
  circuitsVisReady.then(() => CircuitsVis.render(box.id, CircuitsVis.%s, %s))
    .catch((error) => { box.textContent = "This view needs a newer browser (2023): " + error; });
}
</script>"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>%s</title>
<style>body { margin: 12px; background: white; color: #1a1a1a; }
h1 { font: 600 1.1rem system-ui, sans-serif; }</style>
%s
</head>
<body>
%s
</body>
</html>
"""

_FIT_FRAME = """<script>
new ResizeObserver(() => {
  const height = document.documentElement.getBoundingClientRect().height;
  if (window.frameElement) frameElement.style.height = Math.ceil(height) + "px";
}).observe(document.documentElement);
</script>"""


@dataclass(frozen=True, eq=False)
class AttentionView:
    """Patterns of some heads over one sequence, ready to be shown; see ``attention_view``."""

    component: str
    """Name of the circuitsvis element."""
    props: str
    """Its properties as JSON that is safe inside a script element."""
    n_heads: int
    n_tokens: int
    heading: str = ""
    """Name of the head where there is but one; several heads carry their names in the drawing."""

    def fragment(self) -> str:
        """The HTML of this view alone, for a page that holds ``script_html()`` before it."""
        heading = f"<h3>{html.escape(self.heading)}</h3>" if self.heading else ""
        return _FRAGMENT % (heading + "<div></div>", self.component, self.props)

    def save_html(self, path: str | Path, *, title: str = "Attention view") -> Path:
        """Writes the view as a page that works with no network; returns its path."""
        path = Path(path)
        path.write_text(page_of({"": self}, title=title), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        heads = "1 head" if self.n_heads == 1 else f"{self.n_heads} heads"
        return f"AttentionView({heads}, {self.n_tokens} tokens)"

    def _repr_html_(self) -> str:
        page = html.escape(_page("Attention view", self.fragment() + _FIT_FRAME))
        height = 640 if self.n_heads == 1 else 800
        note = f"{self!r}: open this notebook in Jupyter or VS Code to see it drawn."
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:0" '
            f'title="{html.escape(repr(self))}">{html.escape(note)}</iframe>'
        )


def attention_view(
    patterns: Float[Tensor, "head query key"] | Float[np.ndarray, "head query key"],
    tokens: Sequence[str | int],
    *,
    head_names: Sequence[str] | None = None,
    causal: bool = True,
    full_colour: float | None = None,
) -> AttentionView:
    """A view of the heads' patterns (or logits), destination tokens down, source tokens across.

    >>> attention_view(np.eye(3)[None], ["a", "b", "c"])
    AttentionView(1 head, 3 tokens)

    Args:
        patterns: what each query gives to each key; masked logits (−inf) are drawn empty. Values
            are kept to four decimals.
        tokens: the sequence, as text or as numbers; at most ``MAX_TOKENS``.
        head_names: a name for each head; "Head 0", "Head 1", ... where None.
        causal: greys the keys after each query.
        full_colour: value drawn in full colour (blue, and red below zero). Where None it is 1 for
            patterns, so that views compare, and the largest absolute value for anything else.

    Raises:
        ValueError: patterns are not [head, query, key] of the tokens' length, hold NaN or +inf,
            head names do not match, or there are no tokens or more than ``MAX_TOKENS``.
    """
    if isinstance(patterns, Tensor):
        patterns = patterns.detach().cpu().double().numpy()
    _check(patterns, tokens, head_names)
    values = np.where(np.isneginf(patterns), 0.0, patterns).astype(np.float64)
    if full_colour is None:
        is_pattern = values.min() >= 0 and values.max() <= 1 + 1e-4
        full_colour = 1.0 if is_pattern else float(np.abs(values).max())
    props = {
        "tokens": [str(token) for token in tokens],
        "maxValue": full_colour,
        "minValue": -full_colour,
        "maskUpperTri": causal,
    }
    rounded = np.round(values, _DECIMALS).tolist()
    names = [f"Head {index}" for index in range(len(values))] if head_names is None else head_names
    if len(values) > 1:
        props |= {"attention": rounded, "attentionHeadNames": list(names)}
        return AttentionView("AttentionHeads", _json(props), len(values), len(tokens))
    props |= {"attention": rounded[0], "zoomed": True}
    heading = "" if head_names is None else head_names[0]
    return AttentionView("AttentionPattern", _json(props), 1, len(tokens), heading)


def page_of(views: dict[str, AttentionView], *, title: str = "Attention views") -> str:
    """One page with every view under its heading and one copy of circuitsvis's script.

    >>> view = attention_view(np.eye(2)[None], ["a", "b"])
    >>> page_of({"first": view, "second": view}).count("atob(")
    1
    """
    parts = []
    for heading, view in views.items():
        title_line = f"<h1>{html.escape(heading)}</h1>\n" if heading else ""
        parts.append(title_line + view.fragment())
    return _page(title, "\n".join(parts))


@cache
def script_html() -> str:
    """What a page needs once, before its first fragment: style and circuitsvis's own script."""
    source = resources.files("circuitsvis").joinpath("dist/cdn/iife.js").read_bytes()
    source = source.rsplit(b"//# sourceMappingURL=", 1)[0]  # a file beside it, which is not there
    packed = base64.b64encode(gzip.compress(source, 9, mtime=0)).decode()
    return _STYLE + "\n" + _LOADER % packed


def _page(title: str, body: str) -> str:
    return _PAGE % (html.escape(title), script_html(), body)


def _json(props: dict[str, object]) -> str:
    """JSON in which no token can end or open an element or a comment of the page."""
    return json.dumps(props, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _check(
    patterns: np.ndarray, tokens: Sequence[str | int], head_names: Sequence[str] | None
) -> None:
    faults = []
    n = len(tokens)
    if not 1 <= n <= MAX_TOKENS:
        faults.append(
            f"tokens has {n} entries, a view takes 1 to {MAX_TOKENS}; show a part: "
            f"patterns[:, :{MAX_TOKENS}, :{MAX_TOKENS}], tokens[:{MAX_TOKENS}]"
        )
    if patterns.ndim != 3 or patterns.shape[1:] != (n, n) or len(patterns) == 0:
        faults.append(
            f"patterns has shape {tuple(patterns.shape)}, expected [head, query, key] with "
            f"{n} queries and keys, one a token"
        )
    elif np.isnan(patterns).any() or np.isposinf(patterns).any():
        faults.append("patterns holds NaN or +inf; only -inf, a masked logit, can be drawn")
    if head_names is not None and len(head_names) != len(patterns):
        faults.append(f"head_names has {len(head_names)} entries for {len(patterns)} heads")
    if faults:
        raise ValueError("; ".join(faults))
