"""Planted heads do what they say, and every probe finds it."""

import math

import numpy as np
import pytest
import torch

from lenprobe import planted
from lenprobe.probes.carrier import carrier_of
from lenprobe.probes.decomposition import decompose
from lenprobe.probes.routing import routing_of
from lenprobe.probes.rule import rule_of
from lenprobe.reading import random_tokens, read


def pattern_of(head, length=48, batch=4):
    tokens = random_tokens(head.model.cfg.d_vocab, batch, length, 0)
    return tokens, read(head.model, tokens, head.layer, [head.head]).pattern[:, 0].numpy()


@pytest.mark.bridge
@pytest.mark.parametrize("d", [0, 1, 5, 20])
def test_a_carrier_attends_to_its_offset(d):
    head = planted.carrier(d)
    _, pattern = pattern_of(head)
    for i in range(d, 48):
        assert (pattern[:, i].argmax(-1) == i - d).all()
    found = carrier_of(head.model, 0, 0)
    np.testing.assert_allclose(found.kernel[:256], head.truth.relative, atol=1e-10)
    g = head.truth.relative[: head.truth.train_length]
    assert g[d] - np.delete(g, d).max() == pytest.approx(8.0)


@pytest.mark.bridge
@pytest.mark.parametrize("slot", [0, 7])
def test_a_pin_attends_to_its_slot(slot):
    head = planted.pin(slot)
    tokens, pattern = pattern_of(head)
    assert (pattern[:, slot:].argmax(-1) == slot).all()
    mass = np.zeros((4, 16))
    np.add.at(mass, (np.arange(4)[:, None], tokens.numpy()), pattern[:, -1])
    output = head.model(tokens)[:, -1].detach().numpy()
    np.testing.assert_allclose(output, mass, atol=1e-12)  # the mass on each token, exactly


@pytest.mark.bridge
@pytest.mark.parametrize("partner", [0, 1, 5])
def test_a_content_match_attends_to_the_partners_token(partner):
    head = planted.content_match(partner=partner)
    tokens, pattern = pattern_of(head)
    for b in range(4):
        wanted = (tokens[b] == (tokens[b, -1] + partner) % 16).numpy()
        if wanted.any():
            assert pattern[b, -1][wanted].sum() > 0.99


@pytest.mark.bridge
def test_induction_attends_to_what_followed():
    head = planted.induction()
    tokens, pattern = pattern_of(head)
    hits = 0
    for b in range(4):
        followers = [j for j in range(1, 48) if tokens[b, j - 1] == tokens[b, -1]]
        if followers:
            assert pattern[b, -1][followers].sum() > 0.95
            hits += 1
    assert hits >= 3


@pytest.mark.bridge
def test_uniform_heads_are_uniform():
    for encoding in ("rope", "learned"):
        _, pattern = pattern_of(planted.uniform(encoding=encoding))
        np.testing.assert_allclose(pattern[:, 9, :10], 0.1, atol=1e-12)


def random_plants():
    """200 heads: widths 16 to 128, offsets 0 to 64, bases 100 to 10⁶, with and without a lobe."""
    generator = np.random.default_rng(0)
    plants = []
    while len(plants) < 200:
        d_head = int(generator.choice([16, 32, 64, 128]))
        base = float(10 ** generator.uniform(2, 6))
        d = int(generator.integers(0, 65))
        kind = ("offset", "slot", "lobe")[len(plants) % 3]
        if kind == "slot":
            plants.append(planted.pin(int(generator.integers(0, 16)), d_head=d_head))
            continue
        if kind == "offset":
            plants.append(planted.carrier(d, d_head=d_head, base=base))
            continue
        lobe = int(generator.integers(max(16, d + 8), 256))
        try:
            plants.append(planted.side_lobe(d, lobe, d_head=d_head, base=base))
        except ValueError as error:  # not every lobe can be had of every set of frequencies
            assert "no carrier with" in str(error)
    return plants


def test_peak_slot_and_horizon_are_exact_on_200_planted_heads():
    wrong = []
    for head in random_plants():
        truth = head.truth
        length = truth.train_length + 16 * (truth.kind == "slot")  # late slots need late queries
        tokens = random_tokens(head.model.cfg.d_vocab, 8, length, 0)
        found = rule_of(head.model, 0, 0, tokens, length=256 if truth.kind == "offset" else None)
        number = truth.offset if truth.kind == "offset" else truth.slot
        exact = (found.kind, found.number) == (truth.kind, number) and found.found
        if truth.kind == "offset":
            carrier = carrier_of(head.model, 0, 0, tokens, length=256)
            exact &= carrier.peak == number and found.horizon == truth.horizon == carrier.horizon
        if not exact:
            wrong.append((truth.kind, number, truth.horizon, str(found)))
    assert wrong == []


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_shares_are_within_three_hundredths_of_the_truth(weight):
    head = planted.mixture(weight)
    found = decompose(head.model, 0, 0, random_tokens(16, 64, 64, 0))
    np.testing.assert_allclose(found.shares, head.truth.shares(64), atol=0.03)


def test_mixtures_are_ordered_right_at_steps_of_a_tenth():
    found = [routing_of(planted.mixture(w / 10).model, 0, 0) for w in range(11)]
    shares = [each.positional_share for each in found]
    positional, symbolic = np.array([each.swap for each in found]).T
    assert (np.diff(shares) > 0).all()
    assert (np.diff(positional) > 0).all() and (np.diff(positional - symbolic) > 0).all()


SENTENCES = {
    "lobe": (planted.side_lobe, (3, 101), "holds to length 101, then a side lobe at 101 wins"),
    "carrier": (planted.carrier, (3,), "attends to offset 3 (100% of queries); positional share"),
    "pin": (planted.pin, (4,), "attends to slot 4 (100% of queries)"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence(name):
    plant, arguments, expected = SENTENCES[name]
    assert expected in rule_of(plant(*arguments).model, 0, 0).sentence


def test_content_heads_have_no_rule_of_position():
    found = rule_of(planted.content_match(partner=1).model, 0, 0)
    assert not found.found and found.sentence.startswith("attends by content")


@pytest.mark.parametrize("encoding", ["rope", "learned", "sinusoidal", "alibi", "t5", "none"])
def test_null_heads_have_no_rule(encoding):
    found = 0
    for seed in range(84):
        head = planted.random_head(encoding, seed=seed, n_ctx=64, dtype=torch.float32)
        found += rule_of(head.model, 0, 0, random_tokens(16, 32, 16, seed)).found
    assert found / 84 <= 0.01


BAD = {
    "odd": (planted.carrier, {"offset": 3, "d_head": 31}, r"rotary_dim=31: an even number"),
    "offset": (planted.carrier, {"offset": 40, "train_length": 16}, r"offset=40 .* 0\.\.15"),
    "margin": (planted.carrier, {"offset": 3, "margin": 0.0}, r"margin=0\.0 plants no peak"),
    "lobe": (planted.side_lobe, {"offset": 3, "lobe": 8}, r"lobe=8 is out of range; .* 16\.\.255"),
    "no lobe": (planted.side_lobe, {"offset": 3, "lobe": 20, "d_head": 2}, r"no carrier with 1"),
    "slot": (planted.pin, {"slot": -1}, r"slot=-1 is out of range; take one in 0\.\.15"),
    "vocabulary": (planted.carrier, {"offset": 1, "d_vocab": 99}, r"d_vocab=99: .* 2\.\.d_head=32"),
    "weight": (planted.mixture, {"weight": 1.5}, r"weight=1\.5 is not a share"),
    "narrow": (planted.mixture, {"weight": 0.5, "d_head": 16}, r"d_head=16 leaves no dimension"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    plant, arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        plant(**arguments)


def test_unknown_shares_are_refused():
    with pytest.raises(ValueError, match="of kind 'random' are not known by plan"):
        planted.random_head().truth.shares(16)
    assert math.isinf(planted.carrier(3).truth.horizon)
