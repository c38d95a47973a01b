"""Pinning: exact slots, plain loops, relative rules are not pinned, null heads, both arms."""

import numpy as np
import pytest
import tiny_models as tiny
import torch
from conftest import trained
from hypothesis import given, settings
from hypothesis import strategies as st

from lenprobe import FixedOffset, accuracy_by_length, build, fit
from lenprobe.planted import carrier, content_match, pin, random_head, uniform
from lenprobe.probes.pinning import Pinning, argmax_shares, pinning_of
from lenprobe.reading import random_tokens


@pytest.mark.bridge
@pytest.mark.parametrize("slot", [0, 3, 15])
def test_a_planted_slot_is_found(slot):
    found = pinning_of(pin(slot).model, 0, 0)
    assert found.found and found.slot == slot and found.strength == 1.0 and found.inside
    assert found.uniform == pytest.approx(np.mean([1 / (i + 1) for i in range(16, 48)]))


@pytest.mark.parametrize(
    "planted", [carrier(0), carrier(3), carrier(15), content_match(), uniform()], ids=str
)
def test_other_rules_are_not_pinned(planted):
    assert not pinning_of(planted.model, 0, 0).found


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(3, 12))
def test_shares_against_plain_loops(seed, length):
    generator = np.random.default_rng(seed)
    first = int(generator.integers(1, length))
    pattern = np.tril(generator.random((2, length, length)))
    slots, offsets = argmax_shares(torch.from_numpy(pattern), first)
    expected, moving = np.zeros((2, length))
    for b in range(2):
        for i in range(first, length):
            j = max(range(i + 1), key=lambda j: pattern[b, i, j])
            expected[j] += 1 / (2 * (length - first))
            moving[i - j] += 1 / (2 * (length - first))
    np.testing.assert_allclose(slots, expected, atol=1e-12)
    np.testing.assert_allclose(offsets, moving, atol=1e-12)


@pytest.mark.parametrize("encoding", ["rope", "learned", "sinusoidal", "alibi", "t5", "none"])
def test_null_heads_pass_in_one_per_cent_at_most(encoding):
    found = [
        pinning_of(random_head(encoding, seed=s, n_ctx=48, dtype=torch.float32).model, 0, 0).found
        for s in range(84)
    ]
    assert np.mean(found) <= 0.01


def test_learned_positions_pin_and_do_not_where_every_row_is_trained():
    """ArXiv 2607.18759 beside the arm of Huang et al.: random position offsets in training."""
    pinned = pinning_of(trained("learned"), 0, 0)
    assert pinned.inside and pinned.strength >= 5 * pinned.uniform and pinned.found
    model = build("learned_offset", n_ctx=64)
    fit(model, FixedOffset(1), [16], solved=None, progress=False)
    assert not pinning_of(model, 0, 0).found
    assert accuracy_by_length(model, FixedOffset(1), [48]).at(48) >= 0.95


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    found = pinning_of(tiny.bridge("gpt2"), 1, 2, tiny.tokens(), train_length=8)
    again = Pinning.load(found.save(tmp_path / "p.safetensors"))
    np.testing.assert_array_equal(again.argmax_shares, found.argmax_shares)
    assert len(found.to_frame()) == 24 and found.argmax_shares.sum() == pytest.approx(1.0)
    assert found.plot().get_ylabel() == "share of argmax" and "uniform" in str(found)


@pytest.mark.bridge
def test_bad_input_is_named(unchecked):
    model = build("rope")
    with pytest.raises(ValueError, match="does not say on which length it was trained; give"):
        pinning_of(model, 0, 0)
    with pytest.raises(ValueError, match=r"train_length=24 leaves no query .* one in 1\.\.23"):
        pinning_of(model, 0, 0, random_tokens(16, 2, 24, 0), train_length=24)
    with pytest.raises(ValueError, match="head=3"):
        pinning_of(model, 0, 3, train_length=8)
