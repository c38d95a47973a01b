"""Rules: plain loops, every host, what is kept and drawn. Exactness is in test_planted."""

import math

import numpy as np
import pytest
import tiny_models as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from lenprobe.planted import carrier
from lenprobe.probes.rule import Rule, follow_shares, rule_of


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 12))
def test_shares_against_plain_loops(seed, length):
    generator = np.random.default_rng(seed)
    choice = np.array([[generator.integers(-1, i + 1) for i in range(length)] for _ in range(3)])
    offsets, slots = follow_shares(choice)
    for k in range(length):
        able = [(b, i) for b in range(3) for i in range(max(k, 1), length)]
        if len(able) // 3 < min(4, length - 1):
            assert offsets[k] == slots[k] == 0
            continue
        assert offsets[k] == pytest.approx(np.mean([choice[b, i] == i - k for b, i in able]))
        assert slots[k] == pytest.approx(np.mean([choice[b, i] == k for b, i in able]))


@pytest.mark.bridge
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_has_a_sentence(name):
    found = rule_of(tiny.bridge(name), 0, 0, tiny.tokens(16, 20))
    assert found.sentence.startswith("attends") and -0.05 <= found.positional_share <= 1.05
    assert math.isnan(found.horizon) == (found.kind == "slot")


@pytest.mark.bridge
def test_trained_heads_of_the_demo(trained_rope, trained_learned):
    rope, learned = rule_of(trained_rope, 0, 0), rule_of(trained_learned, 0, 0)
    assert "attends to offset 3 (" in rope.sentence and "then a side lobe at" in rope.sentence
    assert (learned.kind, learned.number) == ("offset", 3) and learned.known_to == 16


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    found = rule_of(tiny.bridge("llama"), 0, 1, tiny.tokens())
    again = Rule.load(found.save(tmp_path / "r.safetensors"))
    assert again.sentence == found.sentence and len(found.to_frame()) == 48
    assert found.plot().get_ylabel() == "share of queries"


@pytest.mark.bridge
def test_bad_input_is_named(unchecked):
    model = tiny.bridge("gpt2")
    with pytest.raises(ValueError, match="head=9"):
        rule_of(model, 0, 9)
    with pytest.raises(ValueError, match="length=1 leaves nothing to compare"):
        rule_of(carrier(3).model, 0, 0, length=1)
