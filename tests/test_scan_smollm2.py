"""A real model scanned: both hosts agree, other tools agree, and the heads found matter."""

import numpy as np
import pytest
import torch
from scipy import stats
from test_pretrained import HOSTS, weights

import lenprobe.bench_scan as bench
from lenprobe import ablated, scan
from lenprobe.hosts import host_of
from lenprobe.pretrained import smollm2
from lenprobe.scan_tokens import contents_for, passage

pytestmark = weights

LENGTH, DRAWS = 128, 5


@pytest.fixture(scope="module")
def model():
    return smollm2()


@pytest.fixture(scope="module")
def text(model):
    return contents_for(host_of(model), None, passage(), length=LENGTH, batch=4, seed=0)["text"]


@pytest.fixture(scope="module")
def found(model, text):
    return scan(model, text, progress=False)


@pytest.mark.bridge
def test_every_head_has_its_figures(found):
    frame = found.to_frame()
    assert len(frame) == 270 and not found.failures
    assert (frame["self_check"] <= 1e-4).all() and (frame["equivariance"] < 1e-4).all()
    near = found.most_positional(10)
    assert (near["near"] == 1).sum() >= 5  # previous-token heads
    assert (near["near_weight"] > 0.3).sum() >= 5


@pytest.mark.skipif(len(HOSTS) < 2, reason="needs both hosts, which TransformerLens 3.9 has")
def test_both_hosts_give_the_same_figures(found, text):
    other = scan(smollm2("hooked"), text, progress=False)
    assert other.columns == found.columns
    names = ["share", "weight", "relative", "absolute", "other", "content", "alignment", "previous"]
    a, b = (each.to_frame()[names].to_numpy() for each in (found, other))
    seen = np.isfinite(a)
    assert np.abs(a - b)[seen].max() <= 1e-3


@pytest.mark.skipif(len(HOSTS) < 2, reason="head_detector takes a HookedTransformer")
def test_previous_token_heads_are_those_of_head_detector(text):
    from transformer_lens.head_detector import detect_head

    hooked = smollm2("hooked")
    sentences = [hooked.tokenizer.decode(row) for row in text[:2]]
    tokens = torch.cat([hooked.to_tokens(sentence)[:, :LENGTH] for sentence in sentences])
    own = scan(hooked, tokens, progress=False).grid("previous")
    sentences = [hooked.tokenizer.decode(row) for row in tokens[:, 1:]]
    theirs = detect_head(hooked, sentences, "previous_token_head").numpy()
    assert stats.spearmanr(own.ravel(), theirs.ravel()).statistic >= 0.9
    assert set(np.argsort(own.ravel())[-5:]) & set(np.argsort(theirs.ravel())[-5:])


@pytest.mark.bridge
def test_offsets_that_a_previous_token_detector_has_no_name_for(found):
    frame = found.to_frame()
    beyond = frame[(frame["near"] > 1) & (frame["near_weight"] >= 5 * frame["near_uniform"])]
    assert len(beyond) >= 1


def loss_on(model, text):
    with torch.no_grad():
        logits = model(text)
    return float(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    )


def copying_on(model, tokens):
    """Share of the second run of repeated random tokens that is named right."""
    half = tokens.shape[1] // 2
    with torch.no_grad():
        answer = model(tokens).argmax(dim=-1)
    return float((answer[:, half:-1] == tokens[:, half + 1 :]).double().mean())


@pytest.mark.bridge
def test_ablating_the_most_positional_heads_hurts_more(model, found, text, record_property):
    """Ten heads at near offsets against ten random ones of the same layers, over five draws."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1000, 40000, (4, 48), generator=generator)
    repeated = torch.cat([half, half], dim=1)
    chosen = [(int(r.layer), int(r.head)) for r in found.most_positional(10).itertuples()]
    assert len(chosen) == 10
    draw = np.random.default_rng(0)
    heads = host_of(model).n_heads
    others = []
    for _ in range(DRAWS):
        picked: set[tuple[int, int]] = set()
        for layer, _head in chosen:
            free = [h for h in range(heads) if (layer, h) not in picked | set(chosen)]
            picked.add((layer, int(draw.choice(free))))
        others.append(sorted(picked))
    figures = []
    for silent in ([], chosen, *others):
        with ablated(model, silent):
            figures.append((loss_on(model, text), copying_on(model, repeated)))
    (loss, copying), (own_loss, own_copying), *rest = figures
    record_property("loss", [loss, own_loss, [each[0] for each in rest]])
    record_property("copying", [copying, own_copying, [each[1] for each in rest]])
    assert own_loss - loss > max(each[0] for each in rest) - loss
    assert copying - own_copying > copying - min(each[1] for each in rest)


def test_the_bench_of_a_scan(monkeypatch):
    """Too short for its ratios to say anything; all three peers run and are compared."""
    monkeypatch.setattr(bench, "LENGTH", 16)
    monkeypatch.setattr(bench, "BATCH", 2)
    found = bench.bench_scan(repeats=1)
    time, memory = found.ratios
    assert time == found.scan["seconds"] / found.plain["seconds"] > 0 and memory > 0
    assert found.holds == (time <= 1.3 and memory <= 1.15)
    assert found.summary().endswith("holds" if found.holds else "does not hold")
    with (
        pytest.raises(RuntimeError, match=r"(?s)times 'nothing' ended:.*KeyError"),
        bench._peer("nothing") as turn,
    ):
        turn()
    with pytest.raises(ValueError, match="repeats=0 times nothing"):
        bench.bench_scan(repeats=0)
