"""Scans: the figures of the single probes, every architecture, and nothing lost on the way."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import tiny_models as tiny
import torch

from lenprobe import build, decompose, routing_of, rule_of, save
from lenprobe.cli import main
from lenprobe.hosts import Geometry, host_of
from lenprobe.layer_figures import _Sums, figures_of
from lenprobe.planted import carrier, pin
from lenprobe.probes.alpha import alpha_of
from lenprobe.probes.carrier import carrier_of
from lenprobe.probes.equivariance import equivariance_of
from lenprobe.probes.scan import Scan, scan
from lenprobe.reading import LayerReading, random_tokens, read, row_blocks
from lenprobe.report.scan import write_scan
from lenprobe.scan_tokens import check_room, contents_for, passage, read_text, read_tokens

pytestmark = pytest.mark.bridge


def two_layers(seed=0):
    return build("rope", n_layers=2, n_heads=4, n_ctx=128, init_range=0.4, seed=seed)


def row_of(found, layer, head):
    frame = found.to_frame()
    return frame[(frame["layer"] == layer) & (frame["head"] == head)].iloc[0]


# --- the figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer,head", [(0, 0), (1, 2)])
def test_each_figure_is_that_of_its_probe(layer, head):
    model = two_layers()
    tokens = random_tokens(16, 8, 64, 0)
    row = row_of(scan(model, tokens, batch=8, progress=False), layer, head)
    parts = decompose(model, layer, head, tokens, resamples=10)
    np.testing.assert_allclose(
        row[["relative", "absolute", "other", "content"]].astype(float), parts.shares, atol=1e-6
    )
    assert row["spread"] == pytest.approx(math.sqrt(parts.variance), rel=1e-5)
    rule = rule_of(model, layer, head, tokens)
    assert (row["rule"], row["number"]) == (rule.kind, rule.number)
    assert row["share"] == pytest.approx(rule.share)
    assert row["weight"] == pytest.approx(rule.weight, rel=1e-5)
    assert row["uniform"] == pytest.approx(rule.uniform)
    assert row["found"] == rule.found
    target = rule.number if rule.kind == "offset" else None
    wave = carrier_of(model, layer, head, tokens, length=128, target=target)
    assert row["alignment"] == pytest.approx(wave.alignment, abs=1e-5)
    assert row["horizon"] == wave.horizon
    carried = alpha_of(model, layer, head, tokens, train_length=16, lengths=[32, 64])
    np.testing.assert_allclose(row[["alpha 32", "alpha 64"]].astype(float), carried.alpha)
    pattern = read(model, tokens, layer, [head]).pattern[:, 0]
    previous = pattern.diagonal(-1, dim1=-2, dim2=-1).mean()
    assert row["previous"] == pytest.approx(float(previous), rel=1e-5)


def test_equivariance_is_that_of_the_head_in_float32():
    model, tokens = two_layers(), random_tokens(16, 4, 32, 0)
    row = row_of(scan(model, tokens, progress=False), 1, 0)
    probe = equivariance_of(model, 1, 0, tokens[:1], shifts=[4096], dtypes=["float32"])
    assert 0 < row["equivariance"] < 1e-5
    assert row["equivariance"] == pytest.approx(float(probe.head_level[0, 0, 0]), rel=0.5)


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_a_planted_offset_is_found(offset):
    head = carrier(offset)
    row = row_of(scan(head.model, length=48, progress=False), head.layer, head.head)
    assert row["rule"] == "offset" and row["number"] == offset and row["found"]
    assert row["peak"] == offset and row["relative"] > 0.99 and row["alpha 48"] == 1.0


def test_a_planted_slot_is_found():
    head = pin(2)
    row = row_of(scan(head.model, length=32, progress=False), head.layer, head.head)
    assert row["rule"] == "slot" and row["number"] == 2 and row["found"]
    assert math.isnan(row["alignment"]) and math.isnan(row["equivariance"])


def test_usage_says_which_pairs_carry_the_rule():
    head = carrier(3)
    found = scan(head.model, length=32, progress=False)
    wave = carrier_of(head.model, head.layer, head.head)
    np.testing.assert_allclose(found.usage[0], wave.amplitudes / wave.amplitudes.sum(), atol=1e-6)
    np.testing.assert_allclose(found.wavelengths[0], wave.wavelengths)


def test_batches_are_averaged():
    model, tokens = two_layers(), random_tokens(16, 8, 32, 0)
    whole = scan(model, tokens, batch=8, progress=False)
    parts = [scan(model, part, progress=False) for part in tokens.split(4)]
    halves = scan(model, tokens, batch=4, progress=False)
    spread = whole.columns.index("spread")
    mean = np.sqrt(np.mean([part.values[:, spread] ** 2 for part in parts], axis=0))
    np.testing.assert_allclose(halves.values[:, spread], mean, rtol=1e-9)
    np.testing.assert_allclose(halves.values[:, spread], whole.values[:, spread], rtol=1e-5)


@pytest.mark.parametrize("cached", [1, 200, 2**18])
@pytest.mark.parametrize("kind", ["causal", "both ways", "window", "blind rows"])
def test_sums_over_rows_are_those_of_the_whole(kind, cached, monkeypatch):
    """However few rows are reduced at a time, against plain NumPy over the whole matrices."""
    monkeypatch.setattr("lenprobe.reading._CACHED", cached)
    n = 9
    index = np.arange(n)
    offset = index[:, None] - index
    mask = {
        "causal": offset >= 0,
        "both ways": offset < n,
        "window": (offset >= 0) & (offset < 4),
        "blind rows": (offset >= 0) & (index[:, None] > 2) & (index > 1),
    }[kind]
    reading = drawn(mask)
    sums = _Sums(reading)
    for block in row_blocks(reading.visible, 6):
        sums.add(block)
    logits, pattern = reading.scores.numpy(), reading.pattern.numpy()
    count = np.maximum(mask.sum(axis=1), 1)
    centred = np.where(mask, logits, 0.0)
    centred = np.where(mask, centred - centred.sum(-1, keepdims=True) / count[:, None], 0.0)
    products = np.einsum("bhij,chij->hbc", centred, centred)
    np.testing.assert_allclose(sums.products, products, atol=1e-12)
    expected = np.concatenate([by_offset(centred), centred.sum(axis=-2)], axis=-1).swapaxes(0, 1)
    np.testing.assert_allclose(sums.sums, expected, atol=1e-12)
    free = pattern.mean(axis=0) * (mask.sum(axis=1) > 1)[:, None]
    weight = np.concatenate([by_offset(free), free.sum(axis=-2)], axis=-1)
    np.testing.assert_allclose(sums.weight, weight, atol=1e-12)
    seen = mask.sum(axis=1) > 1
    largest = np.where(mask, logits, -np.inf).argmax(axis=-1).swapaxes(0, 1)
    largest[0, 0, -1] = -1  # the planted tie
    np.testing.assert_array_equal(sums.choice.numpy()[:, :, seen], largest[:, :, seen])
    common = np.where(mask, centred.mean(axis=0), -np.inf).argmax(axis=-1)
    np.testing.assert_array_equal(sums.common.numpy()[:, seen], common[:, seen])


def by_offset(x):
    n = x.shape[-1]
    diagonals = [np.trace(x, -o, axis1=-2, axis2=-1) for o in range(-(n - 1), n)]
    return np.stack(diagonals, axis=-1)


def drawn(mask):
    """A reading of two sequences and three heads, in float64, with one tie."""
    visible = torch.from_numpy(mask)
    scores = torch.rand(2, 3, *mask.shape, dtype=torch.float64, generator=torch.manual_seed(0))
    scores[0, 0, -1, -2:] = 2.0
    scores.masked_fill_(~visible, -math.inf)
    return LayerReading(
        layer=0,
        heads=(0, 1, 2),
        scores=scores,
        pattern=torch.softmax(scores, dim=-1).nan_to_num(nan=0.0),
        visible=visible,
        queries=None,
        keys=None,
        inputs=torch.zeros(2, len(mask), 1),
        geometry=Geometry(rotation=None, scale=1.0),
        self_check=0.0,
    )


def test_swap_scores_on_request():
    head = carrier(3)
    tokens = random_tokens(16, 8, 64, 0)
    found = scan(head.model, tokens, swaps=1, progress=False)
    row = row_of(found, head.layer, head.head)
    short = tokens.reshape(-1, 16)
    expected = routing_of(head.model, head.layer, head.head, short).swap
    np.testing.assert_allclose(row[["swap positional", "swap symbolic"]].astype(float), expected)
    assert row["swap positional"] > 0.9


def test_the_null_is_the_same_model_at_random_initialisation():
    head = carrier(3)
    found = scan(head.model, length=32, null=True, progress=False)
    row = row_of(found, head.layer, head.head)
    rule = rule_of(head.model, head.layer, head.head, random_tokens(16, 8, 32, 0))
    assert row["share"] == 1.0 and row["null share"] < 0.5 and rule.null_share < 0.5
    assert row["null near_weight"] < row["near_weight"] / 2
    plain = scan(head.model, length=32, progress=False)
    np.testing.assert_array_equal(found.values[:, : len(plain.columns)], plain.values)


# --- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture(name):
    model = tiny.bridge(name)
    found = scan(model, tiny.tokens(6, 24), progress=False)
    frame = found.to_frame()
    host = host_of(model)
    assert len(frame) == host.n_layers * host.n_heads and not found.failures
    assert (frame["self_check"] < 1e-5).all()
    total = frame[["relative", "absolute", "other", "content"]].sum(axis=1)
    np.testing.assert_allclose(total, 1.0, atol=1e-9)
    parts = decompose(model, 1, 2, tiny.tokens(6, 24), resamples=10, confidence=0.9)
    row = row_of(found, 1, 2)
    np.testing.assert_allclose(
        row[["relative", "absolute", "other", "content"]].astype(float), parts.shares, atol=1e-3
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt", "bert", "qwen3"])
def test_a_hugging_face_model_itself(name):
    """Wrapped for the user, its weights shared, and left exactly as it was."""
    model = tiny.huggingface(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    tokens = tiny.tokens(4, 16)
    direct = scan(model, tokens, progress=False)
    bridged = scan(tiny.bridge(name), tokens, progress=False)
    np.testing.assert_allclose(direct.values, bridged.values, atol=1e-6)
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert rule_of(model, 0, 0, tokens).kind in ("offset", "slot")


def test_bfloat16_on_request():
    model, tokens = tiny.bridge("llama"), tiny.tokens(4, 24)
    wide, narrow = (scan(model, tokens, dtype=d, progress=False) for d in ("float32", "bfloat16"))
    spread = wide.columns.index("spread")
    np.testing.assert_allclose(narrow.values[:, spread], wide.values[:, spread], rtol=0.05)
    assert next(model.parameters()).dtype == torch.float32
    assert narrow.provenance.settings["dtype"] == "bfloat16"


# --- nothing lost --------------------------------------------------------------------------------


def test_a_layer_that_fails_is_named_and_the_rest_stands():
    model = two_layers()
    if not hasattr(model, "blocks") or not hasattr(model.blocks[0].attn, "hook_attn_scores"):
        pytest.skip("needs a host with a score hook that acts")
    tokens = random_tokens(16, 4, 32, 0)
    whole = scan(model, tokens, progress=False).to_frame()

    def spoil(module, args, out):
        return out * 0.5

    point = model.blocks[0].attn.hook_pattern
    handle = point.register_forward_hook(spoil)
    try:
        found = scan(model, tokens, progress=False)
    finally:
        handle.remove()
    assert list(found.failures) == ["0"] and "softmax of the logits" in found.failures["0"]
    assert found.to_frame()["layer"].unique().tolist() == [1]
    assert "layers that could not be verified: 0" in found.summary()
    assert len(whole) == 8


def test_an_interrupt_keeps_what_is_done(monkeypatch):
    from lenprobe.probes import scan as module

    calls = []

    def interrupted(reading, **settings):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(reading.layer)
        return figures_of(reading, **settings)

    monkeypatch.setattr(module, "figures_of", interrupted)
    found = scan(two_layers(), random_tokens(16, 4, 32, 0), progress=False)
    assert not found.complete and found.to_frame()["layer"].unique().tolist() == [0]
    assert "interrupted" in found.summary()


def test_the_model_is_left_as_it_was():
    model, tokens = two_layers(), random_tokens(16, 4, 32, 0)
    before = model(tokens)
    scan(model, tokens, dtype="float64", progress=False)
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in model.modules() if "Hook" not in str(module))


def test_save_load_and_files(tmp_path):
    head = carrier(2)
    found = scan(head.model, length=32, progress=False)
    again = Scan.load(found.save(tmp_path / "scan.safetensors"))
    pd.testing.assert_frame_equal(again.to_frame(), found.to_frame())
    page = write_scan(found, tmp_path / "out", model=head.model).read_text()
    assert "sortable" in page and "Most positional heads" in page and "aria-sort" in page
    parquet = pd.read_parquet(tmp_path / "out" / "scan.parquet")
    pd.testing.assert_frame_equal(parquet, found.to_frame())
    assert len(pd.read_csv(tmp_path / "out" / "scan.csv")) == len(parquet)
    assert found.grid("weight").shape == (1, 1)
    assert found.plot().get_xlabel() == "head"


# --- tokens --------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a letter, two of them special."""

    all_special_ids = (0, 1)

    def __len__(self):
        return 64

    def __call__(self, text, **_):
        return {"input_ids": [2 + ord(letter) % 62 for letter in text]}

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.fixture
def with_tokenizer():
    model = tiny.bridge("llama")
    model.tokenizer = Letters()
    return model


def test_random_tokens_and_text_are_both_read(with_tokenizer):
    found = scan(with_tokenizer, length=32, progress=False)
    assert dict.fromkeys(found.tokens) == {"random": None, "text": None}
    assert found.summary().count("tokens:") == 2
    sources = contents_for(host_of(with_tokenizer), None, None, length=64, batch=3, seed=0)
    assert sources["random"].min() >= 2 and sources["text"].shape == (3, 64)
    assert len(passage()) > 5000


def test_own_text(with_tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("words and words " * 20)
    found = scan(with_tokenizer, text=read_text(path), length=32, progress=False)
    assert set(found.tokens) == {"text"}


def test_token_files(tmp_path):
    path = tmp_path / "tokens.txt"
    path.write_text("1 2 3\n4, 5, 6\n\n")
    assert read_tokens(path).tolist() == [[1, 2, 3], [4, 5, 6]]
    for content, message in (
        ("1 2\n3", r"lengths \[1, 2\]"),
        ("1 x", "line 1 holds 'x'"),
        ("", "holds 0 sequences"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_tokens(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_tokens(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_text(tmp_path / "none")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no UTF-8 text"):
        read_text(path)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"length": 4}, "length=4: 8 to n_ctx=128"),
        ({"length": 500}, "length=500: 8 to n_ctx=128"),
        ({"batch": 1}, "batch=1: 2 or more"),
        ({"text": "too short", "length": 32}, "text has 9 tokens, too few for 2 sequences"),
        ({"dtype": "int8"}, "dtype='int8': take one of float32"),
        ({"length": 32, "train_length": 32}, "train_length=32: 2 to 31"),
        ({"length": 32, "reach": 8}, "reach=8: 32 or more"),
        ({"tokens": torch.zeros(1, 9, dtype=torch.int64)}, "2 sequences or more"),
        ({"tokens": torch.full((2, 9), 64)}, "outside the vocabulary 0..63"),
        ({"tokens": torch.zeros(2, 9, dtype=torch.int64), "length": 9}, "leave text and length"),
    ],
)
def test_bad_input(with_tokenizer, arguments, message, unchecked):
    with pytest.raises(ValueError, match=message):
        scan(with_tokenizer, progress=False, **arguments)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        scan(two_layers(), text="words", progress=False)


def test_no_room_is_known_before_anything_runs():
    host = host_of(two_layers())
    check_room(host, 128, 4)
    with pytest.raises(ValueError, match=r"needs about [\d.]+ GB .* take length=\d+ or less"):
        check_room(host, 2**20, 4)


# --- the command line ----------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    folder = save(two_layers(), tmp_path / "model")
    out = tmp_path / "out"
    command = ["scan", str(folder), "--length", "32", "--out", str(out), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert "nearest and strongest" in found["summary"] and found["complete"]
    assert sorted(path.name for path in out.iterdir()) == ["scan.csv", "scan.html", "scan.parquet"]
    assert main(["scan", str(folder), "--tokens", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["scan", str(folder), "--device", "tpu"]) == 2
    assert "device='tpu' is not there; this machine has cpu" in capsys.readouterr().err
