"""The decomposition: plain least squares, planted truth, what softmax cannot tell, bad input."""

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenprobe.planted import carrier, pin, random_head
from lenprobe.probes.decomposition import Decomposition, Design, decompose, relative_part
from lenprobe.reading import random_tokens


def reference(kernel, visible):
    """R and c by a dense least-squares fit with one column a row, offset and key."""
    n = len(kernel)
    query, key = np.nonzero(visible)
    pairs = np.arange(len(query))
    x = np.zeros((len(query), 3 * n))
    x[pairs, query] = x[pairs, n + query - key] = x[pairs, 2 * n + key] = 1
    solution = np.linalg.lstsq(x, kernel[visible], rcond=None)[0]
    r, c = solution[n : 2 * n], solution[2 * n :]
    line = np.arange(n) - (n - 1) / 2
    slope = line @ c / (line @ line)  # a trend in j is a trend in −Δ and a row part
    c = c - c.mean() - slope * line
    r = r - slope * np.arange(n)
    return r - r.mean(), c


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(4, 12))
def test_parts_against_dense_least_squares(seed, n):
    kernel = np.random.default_rng(seed).normal(size=(n, n))
    visible = np.tril(np.ones((n, n), dtype=bool))
    r, c = reference(kernel, visible)
    design = Design.of(visible)
    relative, absolute = design.solve(design.moments(kernel[None]).sums[0])
    np.testing.assert_allclose(relative, r, atol=1e-9)
    np.testing.assert_allclose(absolute, c, atol=1e-9)
    np.testing.assert_allclose(relative_part(kernel, visible), r, atol=1e-9)


def test_shares_against_plain_sums():
    """With the correction for the batch: products of different sequences hold no content noise."""
    n, batch = 7, 6
    logits = np.random.default_rng(1).normal(size=(batch, n, n)) + np.arange(n)[:, None] ** 0.5
    visible = np.tril(np.ones((n, n), dtype=bool))
    centred = np.where(visible, logits, 0)
    centred -= np.where(visible, centred.sum(-1, keepdims=True) / np.arange(1, n + 1)[:, None], 0)
    parts = []
    for each in centred:
        r, c = reference(each, visible)
        out = []
        for kernel in (
            r[np.abs(np.subtract.outer(np.arange(n), np.arange(n)))],
            np.tile(c, (n, 1)),
        ):
            mean = np.where(visible, kernel, 0).sum(-1) / np.arange(1, n + 1)
            out.append(np.where(visible, kernel - mean[:, None], 0))
        parts.append(out)
    total = np.mean([(x * x).sum() for x in centred])
    pairs = [(a, b) for a in range(batch) for b in range(batch) if a != b]
    relative = np.mean([(parts[a][0] * centred[b]).sum() for a, b in pairs])
    absolute = np.mean([(parts[a][1] * centred[b]).sum() for a, b in pairs])
    positional = np.mean([(centred[a] * centred[b]).sum() for a, b in pairs])
    expected = [relative, absolute, positional - relative - absolute, total - positional]
    found = Design.of(visible).moments(logits).shares()[0]
    np.testing.assert_allclose(found, np.array(expected) / total, atol=1e-9)
    assert found.sum() == pytest.approx(1.0)


@pytest.mark.bridge
@pytest.mark.parametrize("head", [carrier(3), pin(5)], ids=["carrier", "pin"])
def test_planted_parts(head):
    found = decompose(head.model, 0, 0, random_tokens(16, 64, 48, 0))
    np.testing.assert_allclose(found.shares, head.truth.shares(48), atol=0.03)
    fitted = found.relative[np.abs(np.subtract.outer(np.arange(48), np.arange(48)))]
    rebuilt = fitted + found.absolute[None, :]
    seen = np.isfinite(found.kernel)
    rebuilt = np.where(seen, rebuilt, 0)
    rebuilt -= rebuilt.sum(-1, keepdims=True) / np.arange(1, 49)[:, None]
    np.testing.assert_allclose(
        rebuilt[seen], found.kernel[seen], atol=1e-3
    )  # float32 tables on 4.x
    assert found.found and found.intervals[:3].sum(0) == pytest.approx([1, 1], abs=0.05)


def test_alibi_and_an_absolute_ramp_are_one_thing_under_softmax():
    """Both are reported as relative, with a note that logits cannot tell."""
    alibi = random_head("alibi").model
    ramp = pin(0, n_ctx=32).model
    with torch.no_grad():
        ramp.W_pos[:, -1] = torch.arange(32) / 256 / 12  # c(j) = j / 256
        for name in ("W_Q", "b_Q"):
            getattr(alibi.blocks[0].attn, name).zero_()
    tokens = random_tokens(16, 32, 24, 0)
    for model in (alibi, ramp):
        found = decompose(model, 0, 0, tokens)
        assert found.relative_share == pytest.approx(1.0, abs=1e-6)
        assert found.absolute_share == pytest.approx(0.0, abs=1e-6)
        np.testing.assert_allclose(np.diff(found.relative), -1 / 256, atol=1e-9)
        assert "softmax cannot tell" in found.note and found.note in str(found)


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "bert", "mpt"])
def test_every_mask_is_fitted(name):
    found = decompose(tiny.bridge(name), 0, 0, tiny.tokens(8, 20))
    assert np.isfinite(found.relative).all() and found.shares.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("encoding", ["rope", "learned", "sinusoidal", "alibi", "t5", "none"])
def test_null_heads_are_not_found(encoding):
    """Those with a position bias are positional, by a spread that decides nothing."""
    tokens = random_tokens(16, 16, 16, 0)
    for seed in range(84):
        head = random_head(encoding, seed=seed, dtype=torch.float32)
        assert not decompose(head.model, 0, 0, tokens, resamples=20).found


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    found = decompose(tiny.bridge("llama"), 1, 0, tiny.tokens(8, 16))
    again = Decomposition.load(found.save(tmp_path / "d.safetensors"))
    np.testing.assert_array_equal(again.intervals, found.intervals)
    assert list(found.to_frame()["part"]) == ["relative", "absolute", "other positional", "content"]
    assert found.plot().get_ylabel().startswith("part of the mean logit")


@pytest.mark.bridge
def test_bad_input_is_named(unchecked):
    model = tiny.bridge("llama")
    with pytest.raises(ValueError, match=r"tokens has 3 sequences, too few for a 95 % interval"):
        decompose(model, 0, 0, tiny.tokens(3, 16))
    with pytest.raises(ValueError, match=r"confidence=1 is not a level; take one in \(0, 1\)"):
        decompose(model, 0, 0, tiny.tokens(8, 16), confidence=1)
