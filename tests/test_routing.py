"""Routing: pure kinds, exact swaps against a second run, behaviour on a task, null heads."""

import numpy as np
import pytest
import tiny_models as tiny
import torch

from lenprobe import FixedOffset
from lenprobe.hosts import host_of
from lenprobe.nulls import read_with_null, reinitialised, shuffled_sources
from lenprobe.planted import carrier, content_match, induction, pin, random_head, uniform
from lenprobe.probes.routing import Routing, _moved_logits, draw_swaps, routing_of, swapped_weights
from lenprobe.reading import random_tokens, read

POSITION = {"carrier": carrier(3), "pin": pin(5)}
CONTENT = {
    "match": content_match(),
    "partner": content_match(partner=1),
    "induction": induction(),
}


@pytest.mark.parametrize("name", POSITION)
def test_heads_of_position(name):
    head = POSITION[name]
    found = routing_of(head.model, head.layer, head.head)
    assert found.kind == "position" and found.found
    assert found.swap[0] >= 0.9 and found.swap[1] <= 0.1


@pytest.mark.parametrize("name", CONTENT)
def test_heads_of_content(name):
    head = CONTENT[name]
    tokens = random_tokens(head.model.cfg.d_vocab, 128, 48, 0)
    found = routing_of(head.model, head.layer, head.head, tokens)
    assert found.kind == "content" and found.swap[1] >= 0.9 and found.swap[0] <= 0.1


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "neox", "gemma2", "bloom", "smollm3"])
def test_a_swap_is_what_a_second_run_gives(name):
    """At layer 0 the layer's input is the token alone, so tokens can be swapped instead."""
    model, tokens = tiny.bridge(name), tiny.tokens(6, 16)
    reading = read(model, tokens, 0, [1])
    swaps = draw_swaps(reading.pattern[:, 0], 2, seed=0)
    logits = reading.logits[:, 0].double().numpy()
    found = swapped_weights(logits, _moved_logits(reading, swaps), swaps)
    for r, b in np.ndindex(2, 6):
        i, one, two = (int(x[r, b]) for x in (swaps.query, swaps.first, swaps.second))
        changed = tokens[b : b + 1].clone()
        changed[0, [one, two]] = changed[0, [two, one]]
        again = read(model, changed, 0, [1]).pattern[0, 0, i]
        if reading.visible[i, one] and reading.visible[i, two]:
            np.testing.assert_allclose(found[r, b], again[[one, two]].numpy(), atol=1e-5)


def test_behaviour_follows_the_rule():
    tokens = random_tokens(16, 64, 24, 0)
    found = routing_of(carrier(3).model, 0, 0, tokens, task=FixedOffset(3))
    assert found.behaviour[0] == 1.0 and found.behaviour[1] <= 0.1
    assert found.shuffled_behaviour[0] <= 0.3 and "shuffled source map" in str(found)
    content = routing_of(content_match(partner=1).model, 0, 0, tokens, task=FixedOffset(3))
    assert content.behaviour[0] <= 0.2
    assert np.isnan(routing_of(carrier(3).model, 0, 0, tokens).behaviour).all()


@pytest.mark.parametrize("encoding", ["rope", "learned", "sinusoidal", "alibi", "t5", "none"])
def test_null_heads_are_neither(encoding):
    for seed in range(84):
        model = random_head(encoding, seed=seed, dtype=torch.float32).model
        assert not routing_of(model, 0, 0, random_tokens(16, 32, 16, 0), resamples=5).found
    assert not routing_of(uniform().model, 0, 0).found


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "mpt"])
def test_every_host(name, tmp_path):
    found = routing_of(tiny.bridge(name), 1, 0, tiny.tokens(8, 16), resamples=50)
    assert np.isfinite(found.swap).all() and -1 <= found.swap.min() <= found.swap.max() <= 1
    again = Routing.load(found.save(tmp_path / "r.safetensors"))
    np.testing.assert_array_equal(again.swap_intervals, found.swap_intervals)
    assert "swap scores" in str(found) and len(found.to_frame()) == 8
    assert found.plot().get_xlabel() == "share or score"


@pytest.mark.bridge
def test_bad_input_is_named():
    model = tiny.bridge("llama")
    with pytest.raises(ValueError, match="too few for a 95 % interval"):
        routing_of(model, 0, 0, tiny.tokens(2, 16))
    with pytest.raises(ValueError, match=r"d_vocab=99 tokens, the model 64"):
        routing_of(model, 0, 0, tiny.tokens(8, 16), task=FixedOffset(1, d_vocab=99))
    with pytest.raises(ValueError, match=r"has no query at 16 tokens; pass tokens of 21"):
        routing_of(model, 0, 0, tiny.tokens(8, 16), task=FixedOffset(20))


# --- null baselines ------------------------------------------------------------------------------


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_redrawn_model_comes_back_to_the_bit(name):
    model, tokens = tiny.bridge(name), tiny.tokens()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = model(tokens)
    with pytest.raises(RuntimeError, match="stop"), reinitialised(host_of(model), seed=0):
        assert not torch.allclose(model(tokens), expected)
        raise RuntimeError("stop")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    one, two = (read_with_null(model, 1, 0, tokens, seed=s).random.logits for s in (0, 1))
    assert not torch.equal(one, two)
    again = read_with_null(model, 1, 0, tokens, seed=0)
    assert torch.equal(again.random.logits, one) and torch.equal(model(tokens), expected)


def test_shuffled_sources_ask_the_same_queries():
    sources = FixedOffset(2).sources(40)
    drawn = [shuffled_sources(sources, np.random.default_rng(s)) for s in range(200)]
    for each in drawn:
        assert ((each >= 0) == (sources >= 0)).all() and (each <= np.arange(40)).all()
    last = [each[-1] for each in drawn]
    assert np.mean(last) == pytest.approx(19.5, abs=3) and len(set(last)) > 30
