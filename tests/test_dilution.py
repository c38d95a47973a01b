"""Dilution: laws against plain NumPy, the forecast against the model, bad input."""

import dataclasses
import math

import numpy as np
import pytest
import tiny_models as tiny
import torch
from conftest import trained

from lenprobe import build
from lenprobe.contents import contents_of
from lenprobe.planted import carrier, random_head, side_lobe
from lenprobe.probes.dilution import Dilution, dilution_of
from lenprobe.reading import host_of, random_tokens, read
from lenprobe.readout import readout_of


@pytest.mark.parametrize("d", [0, 3, 11])
def test_the_laws_of_a_head_that_knows_no_content(d):
    planted = carrier(d, margin=2.0)
    g = planted.truth.relative
    found = dilution_of(planted.model, 0, 0, target=d, lengths=[16, 40, 200], sequences=64)
    for index, n in enumerate(found.lengths):
        expected = math.exp(g[d]) / sum(math.exp(x) for x in g[:n])
        for law in (found.exact_law, found.content_law, found.simulated_mass, found.measured_mass):
            assert law[index] == pytest.approx(expected, rel=1e-6)
        assert found.one_margin[index] == pytest.approx(1 / (1 + (n - 1) * math.exp(-2)), rel=1e-9)
    assert found.margin == pytest.approx(2.0) and found.target == d
    masses = [math.exp(g[d]) / sum(math.exp(x) for x in g[:n]) for n in range(d + 1, 201)]
    below = [n for n, mass in zip(range(d + 1, 201), masses, strict=True) if mass < 0.5]
    assert found.half_length == (below[0] if below else math.inf)


def test_a_side_lobe_takes_mass_where_it_stands():
    planted = side_lobe(3, lobe=40, margin=4.0)
    found = dilution_of(planted.model, 0, 0, lengths=[40, 41], sequences=64)
    assert found.exact_law[1] < 0.5 * found.exact_law[0] + 0.05
    np.testing.assert_allclose(found.exact_law, found.measured_mass, rtol=1e-9)


@pytest.mark.parametrize("d", [1, 3, 8])
def test_forecasts_of_trained_heads(d):
    """Past the horizon too: 16 times the training length (arXiv 2607.18759: dilution)."""
    model = trained("rope", d, seed=1)
    found = dilution_of(model, 0, 0, target=d, lengths=[32, 64, 128, 256])
    np.testing.assert_allclose(found.content_law, found.measured_mass, rtol=0.10)
    np.testing.assert_allclose(found.simulated_mass, found.measured_mass, rtol=0.06)
    np.testing.assert_allclose(found.forecast, found.measured_accuracy, atol=0.03)
    assert found.train_length == 16 and found.null_mass[0] < 0.2


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "neox", "gemma2", "bloom", "mpt"])
def test_drawn_logits_are_those_of_the_model(name):
    """Each pair of a sequence, from its own query and key, at its own offset."""
    model = tiny.bridge(name)
    tokens = tiny.tokens(2, 12)
    reading = read(model, tokens, 0, [1])
    contents = contents_of(host_of(model), reading, tokens)
    i = 11
    key = np.array([[12 + i - delta for delta in range(12)]])  # of the second sequence
    drawn = contents.logits(np.array([12 + i]), key)[0]
    expected = reading.logits[1, 0, i].flip(0).double().numpy()
    if contents.bias is not None:  # biases are known up to one number a row
        drawn, expected = drawn - drawn.mean(), expected - expected.mean()
    seen = np.isfinite(expected)  # Gemma's window hides some
    np.testing.assert_allclose(drawn[seen], expected[seen], atol=2e-4)
    np.testing.assert_array_equal(contents.tokens[key[0]], tokens[1].flip(0).numpy())


@pytest.mark.bridge
@pytest.mark.parametrize("soft_cap", [None, 0.02])
def test_moments_against_plain_loops(soft_cap):
    model = build("rope")
    tokens = random_tokens(16, 4, 8, 0)
    contents = contents_of(host_of(model), read(model, tokens, 0, [0]), tokens)
    contents = dataclasses.replace(contents, soft_cap=soft_cap)
    query, key = np.array([3, 20]), np.array([0, 7, 9, 30])
    mean, variance = contents.moments(query, key, 6)
    for a, q in enumerate(query):
        rows = np.array([contents.logits(np.array([q]), np.full((1, 6), k))[0] for k in key])
        np.testing.assert_allclose(mean[a, 1:], rows.mean(0)[1:], atol=1e-12)
        np.testing.assert_allclose(variance[a, 1:], rows.var(0)[1:], atol=1e-12)
        own = contents.logits(np.array([q]), np.full((1, 1), q))[0, 0]
        assert mean[a, 0] == pytest.approx(own) and variance[a, 0] == 0


@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "none"])
def test_the_readout_is_the_models_answer(encoding):
    model = build(encoding, init_range=0.6, seed=2)
    tokens = random_tokens(16, 50, 20, 1)
    pattern = read(model, tokens, 0).pattern[:, 0, -1].flip(-1).double().numpy()
    answers = readout_of(host_of(model)).answers(pattern, tokens.flip(-1).numpy())
    np.testing.assert_array_equal(answers, model(tokens)[:, -1].argmax(-1).numpy())


@pytest.mark.bridge
def test_large_vocabularies_are_read_out_by_mass():
    pattern, tokens = np.array([[0.4, 0.3, 0.3]]), np.array([[9000, 7, 7]])
    from lenprobe.readout import Readout

    assert Readout(d_vocab=10**4).answers(pattern, tokens).tolist() == [7]


@pytest.mark.parametrize("encoding", ["learned", "sinusoidal", "alibi"])
def test_heads_that_do_not_rotate(encoding):
    model = random_head(encoding).model
    found = dilution_of(model, 0, 0, random_tokens(16, 64, 48, 0), lengths=[16, 48], sequences=64)
    assert np.isfinite(found.content_law).all() and not found.found
    with pytest.raises(ValueError, match=r"does not rotate, .* take lengths ≤ 48"):
        dilution_of(model, 0, 0, random_tokens(16, 64, 48, 0), lengths=[49])


def test_random_heads_are_not_found():
    found = [
        dilution_of(random_head(seed=seed, gain=2.0).model, 0, 0, lengths=[16], sequences=1).found
        for seed in range(40)
    ]
    assert sum(found) == 0


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    found = dilution_of(build("rope"), 0, 0, lengths=[8, 300], sequences=8)
    again = Dilution.load(found.save(tmp_path / "d.safetensors"))
    np.testing.assert_array_equal(again.forecast, found.forecast)
    assert np.isnan(found.measured_mass[1]) and np.isfinite(found.forecast).all()
    assert found.plot().get_ylabel() == "share" and len(found.to_frame()) == 2
    assert "–" in str(found) and found.provenance.settings["sequences"] == 8


BAD = {
    "target": ({"target": 64}, ValueError, r"target=64 is not an offset .* take one in 0\.\.63"),
    "float": ({"target": 1.5}, TypeError, r"target=1\.5 is a float"),
    "empty": ({"lengths": []}, ValueError, r"lengths=\[\]: give one or more"),
    "one": ({"lengths": [1]}, ValueError, r"lengths=\[1\]"),
    "sequences": ({"sequences": 0}, ValueError, r"sequences=0 simulates nothing"),
    "head": ({"head": 1}, ValueError, r"head=1"),
}


@pytest.mark.bridge
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, unchecked):
    change, error, message = BAD[case]
    arguments = {"layer": 0, "head": 0, "lengths": [16, 64], **change}
    with pytest.raises(error, match=message):
        dilution_of(build("rope"), **arguments)


@pytest.mark.bridge
def test_nothing_is_left_behind():
    model = build("rope")
    before = torch.get_rng_state(), model(torch.arange(8)[None])
    dilution_of(model, 0, 0, lengths=[8], sequences=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model(torch.arange(8)[None]), before[1])
