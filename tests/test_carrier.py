"""The carrier: known by construction, against plain NumPy, and on trained and other heads."""

import math
import tracemalloc

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenprobe import build, carrier_of
from lenprobe.probes.carrier import (
    Carrier,
    amplitudes_of,
    closed_form,
    diagonal_means,
    evaluate,
)
from lenprobe.reading import host_of, read
from lenprobe.rotation import Rotation


def hand_set(d, *, width=32, base=10000.0, gain=1.5):
    """A head that knows no content: W_Q = W_K = 0, b_Q and b_K planted so that g peaks at d."""
    model = build("rope", d_model=width, d_head=width, rotary_base=base, dtype=torch.float64)
    attn = model.blocks[0].attn
    omega = torch.tensor(base) ** -(torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    with torch.no_grad():
        attn.W_Q.zero_()
        attn.W_K.zero_()
        attn.b_Q[0, ::2], attn.b_Q[0, 1::2] = gain, 0.0
        attn.b_K[0, ::2], attn.b_K[0, 1::2] = (omega * d).cos(), (omega * d).sin()
    return model, omega.numpy()


@pytest.mark.parametrize("d", range(33))
def test_a_hand_set_head_gives_its_offset_back(d):
    model, omega = hand_set(d)
    carrier = carrier_of(model, 0, 0, tiny.tokens(2, 64, d_vocab=16), target=d)
    expected = np.array([1.5 * np.cos(omega * (delta - d)).sum() for delta in range(64)])
    expected /= math.sqrt(32)
    assert carrier.peak == d and carrier.margin > 0 and carrier.percentile == 100
    np.testing.assert_allclose(carrier.kernel[:64], expected, atol=1e-10, rtol=0)
    np.testing.assert_allclose(carrier.measured[:64], expected, atol=1e-10, rtol=0)
    assert np.nanmax(np.abs(carrier.gap)) <= 1e-10
    assert carrier.alignment == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(carrier.amplitudes, 1.5 / math.sqrt(32), atol=1e-12)
    np.testing.assert_allclose(carrier.wavelengths, 2 * np.pi / omega, rtol=1e-12)
    turned = (carrier.phases + omega * d + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(turned, 0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pairs=st.integers(1, 12),
    still=st.integers(0, 3),
    adjacent=st.booleans(),
)
def test_the_closed_form_is_the_rotated_product(seed, pairs, still, adjacent):
    """Against the rotation itself applied to one q and one k."""
    generator = np.random.default_rng(seed)
    omega = generator.uniform(1e-4, np.pi, pairs)
    rotation = Rotation.of(omega, adjacent=adjacent, magnitude=generator.uniform(0.5, 2))
    q, k = generator.normal(size=(2, 2 * pairs + still))
    kernel = evaluate(*amplitudes_of(q, k, rotation, 0.3), 40)
    for delta in (0, 1, 17, 39):
        at = torch.tensor([100, 100 - delta])
        both = torch.from_numpy(np.stack([q, k]))[None, :, None]
        turned = rotation.apply(both, at)[0, :, 0].numpy()
        assert kernel[delta] == pytest.approx(0.3 * turned[0] @ turned[1], abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(2, 3000))
def test_evaluate_against_plain_cosines(seed, length):
    generator = np.random.default_rng(seed)
    a, phase, omega = generator.uniform(0, 2, (3, 7))
    deltas = generator.integers(0, length, 20)
    expected = (a * np.cos(np.outer(deltas, omega) + phase)).sum(1) + 0.25
    np.testing.assert_allclose(evaluate(a, phase, omega, 0.25, length)[deltas], expected, atol=1e-9)


def test_a_million_offsets_fit_in_200_megabytes():
    generator = np.random.default_rng(0)
    a, phase, omega = generator.uniform(0, 1, (3, 64))
    tracemalloc.start()
    kernel = evaluate(a, phase, omega, 0.0, 10**6)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kernel.shape == (10**6,) and most < 200e6
    at = np.array([0, 999_999, 500_003])
    exact = (a * np.cos(np.outer(at, omega) + phase)).sum(1)
    np.testing.assert_allclose(kernel[at], exact, atol=1e-7)


def test_diagonal_means_against_plain_loops():
    generator = np.random.default_rng(0)
    kernel = generator.normal(size=(9, 9))
    index = np.subtract.outer(np.arange(9), np.arange(9))
    visible = (index >= 0) & (index < 5)
    found = diagonal_means(kernel, visible)
    for delta in range(9):
        seen = [kernel[i, i - delta] for i in range(delta, 9)]
        if delta < 5:
            assert found[delta] == pytest.approx(np.mean(seen))
        else:
            assert np.isnan(found[delta])


# --- what follows from it ------------------------------------------------------------------------


def test_rank_is_at_most_two_a_pair_and_one():
    model, _ = hand_set(3, width=8)
    carrier = carrier_of(model, 0, 0, tiny.tokens(2, 32, d_vocab=16))
    values = carrier.singular_values / carrier.singular_values[0]
    assert (values > 1e-12).sum() <= 2 * 4 + 1
    assert 1 <= carrier.rank_95 <= carrier.rank_99 <= 9
    assert 1 <= carrier.participation_rank <= carrier.entropy_rank <= 9


def test_singular_values_are_those_of_the_whole_grid():
    model, omega = hand_set(2, width=8)
    carrier = carrier_of(model, 0, 0, tiny.tokens(2, 80, d_vocab=16))
    offsets = np.subtract.outer(np.arange(80), np.arange(80))
    grid = 1.5 / math.sqrt(8) * np.cos(omega * (offsets[..., None] - 2)).sum(-1)
    np.testing.assert_allclose(
        carrier.singular_values, np.linalg.svd(grid, compute_uv=False), atol=1e-9
    )


def test_horizon_is_the_first_untrained_offset_that_reaches_the_target():
    """Two pairs whose waves meet again: cos(2πΔ/10) + cos(2πΔ/15) repeats every 30 offsets."""
    omega = 2 * np.pi / np.array([10.0, 15.0])
    phases = -omega * 4
    kernel = evaluate(np.ones(2), phases, omega, 0.0, 200)
    carrier = made(kernel, np.ones(2), phases, omega, target=4, train_length=16)
    assert carrier.peak == 4 and carrier.horizon == 34
    assert made(kernel, np.ones(2), phases, omega, target=4, train_length=35).horizon == 64
    assert math.isinf(made(kernel[:30], np.ones(2), phases, omega, target=4).horizon)
    assert "at offset 34" in str(carrier)


def made(kernel, amplitudes, phases, omega, *, target, train_length=16):
    from lenprobe.results import Provenance

    return Carrier(
        provenance=Provenance(verb="test", model="none"),
        offsets=np.arange(len(kernel)),
        kernel=kernel,
        measured=np.full(len(kernel), np.nan),
        amplitudes=amplitudes,
        phases=phases,
        frequencies=omega,
        constant=0.0,
        target=target,
        train_length=train_length,
        singular_values=np.ones(2),
        qk_singular_values=None,
        qk_overlap=None,
    )


def test_margin_and_percentile_against_plain_numpy():
    omega = np.array([0.3, 0.05])
    phases = -omega * 4
    kernel = evaluate(np.array([1.0, 0.5]), phases, omega, 0.0, 64)
    carrier = made(kernel, np.array([1.0, 0.5]), phases, omega, target=6)
    others = [kernel[x] for x in range(16) if x != 6]
    assert carrier.margin == pytest.approx(kernel[6] - max(others))
    assert carrier.percentile == 100 * sum(kernel[x] <= kernel[6] for x in range(16)) / 16
    aligned = (1.0 * math.cos(0.3 * 2) + 0.5 * math.cos(0.05 * 2)) / 1.5
    assert carrier.alignment == pytest.approx(aligned)


# --- the QK circuit ------------------------------------------------------------------------------


def huggingface_projections(name, layer, head):
    """W_Q, b_Q and W_K, b_K of a head as Hugging Face keeps them, inputs first."""
    model = tiny.huggingface(name)
    weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    size, heads = 8, 4

    def own(kind):
        if name == "gpt2":
            place = f"transformer.h.{layer}.attn.c_attn"
            part = slice(0, 32) if kind == "q" else slice(32, 64)
            w, b = weights[f"{place}.weight"][:, part].T, weights[f"{place}.bias"][part]
        elif name == "neox":
            place = f"gpt_neox.layers.{layer}.attention.query_key_value"
            w = weights[f"{place}.weight"].reshape(heads, 3, size, 32)[:, "qk".index(kind)]
            b = weights[f"{place}.bias"].reshape(heads, 3, size)[:, "qk".index(kind)]
        else:
            (place,) = (n for n in weights if f"layers.{layer}." in n and f"{kind}_proj.w" in n)
            w = weights[place]
            b = weights.get(place.replace("weight", "bias"), np.zeros(len(w)))
        w, b = w.reshape(-1, size, 32), b.reshape(-1, size)
        at = head * len(w) // heads
        return w[at].T, b[at]

    return own("q"), own("k")


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "neox", "gpt2", "opt", "phi"])
def test_qk_singular_values_against_the_whole_matrix(name):
    model, target = tiny.bridge(name), 5
    carrier = carrier_of(model, 1, 2 if name not in ("neox",) else 1, tiny.tokens(), target=target)
    head = carrier.provenance.head
    reading = read(model, tiny.tokens(), 1, [head])
    x = reading.inputs.double().reshape(-1, 32).numpy()
    (w_q, b_q), (w_k, b_k) = huggingface_projections(name, layer=1, head=head)
    mean = x.mean(0)
    left, right = (w + np.outer(mean, b) / (mean @ mean) for w, b in ((w_q, b_q), (w_k, b_k)))
    size = w_q.shape[1]
    turn = np.eye(size)
    if reading.rotation is not None:
        at = torch.tensor([0])
        basis = torch.eye(size, dtype=torch.float64)[None, :, None]
        turned = [
            reading.rotation.apply(basis[:, d : d + 1], at + target)[0, 0, 0].numpy()
            for d in range(size)
        ]
        turn = np.array(turned)  # row d: basis vector d turned to the target position
    whole = reading.scale * left @ turn @ right.T
    u, values, v = np.linalg.svd(whole)
    size = min(len(values), len(carrier.qk_singular_values))
    np.testing.assert_allclose(
        carrier.qk_singular_values[:size], values[:size], atol=2e-3 * values[0]
    )
    direction = mean / np.linalg.norm(mean)
    expected = np.abs([direction @ u[:, 0], direction @ v[0]])
    np.testing.assert_allclose(carrier.qk_overlap, expected, atol=2e-2)


def test_a_planted_head_lives_on_the_mean_residual_direction():
    model, _ = hand_set(3)
    carrier = carrier_of(model, 0, 0, tiny.tokens(2, 32, d_vocab=16), target=3)
    np.testing.assert_allclose(carrier.qk_overlap, 1.0, atol=1e-9)
    assert (carrier.qk_singular_values[1:] < 1e-9 * carrier.qk_singular_values[0]).all()


@pytest.mark.bridge
def test_no_qk_svd_under_a_qk_norm():
    carrier = carrier_of(tiny.bridge("qwen3"), 0, 0, tiny.tokens())
    assert carrier.qk_singular_values is None and carrier.qk_overlap is None


# --- trained heads -------------------------------------------------------------------------------


@pytest.mark.bridge
def test_a_trained_rope_head_has_an_aligned_carrier(trained_rope):
    carrier = carrier_of(trained_rope, 0, 0, target=3)
    assert carrier.peak == 3 and carrier.margin > 0
    assert carrier.alignment >= 0.6
    assert carrier.correlation >= 0.999
    assert carrier.train_length == 16


@pytest.mark.bridge
def test_a_trained_learned_head_has_a_measured_carrier_only(trained_learned):
    carrier = carrier_of(trained_learned, 0, 0)
    assert not carrier.has_closed_form and math.isnan(carrier.alignment)
    assert len(carrier.offsets) == 16 and carrier.peak == 3
    with pytest.raises(ValueError, match="does not rotate"):
        closed_form(read(trained_learned, tiny.tokens(2, 16, d_vocab=16), 0, [0]))


@pytest.mark.bridge
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_has_a_carrier(name):
    """Measured and closed form agree where contents are uniform and the model is random."""
    model = tiny.bridge(name)
    tokens = tiny.tokens(64, 24)
    carrier = carrier_of(model, 0, 0, tokens)
    assert carrier.has_closed_form == (read(model, tokens, 0).rotation is not None)
    if carrier.has_closed_form:
        spread = read(model, tokens, 0, [0]).logits
        spread = spread[torch.isfinite(spread)].std().item()
        seen = np.isfinite(carrier.measured) & (carrier.offsets >= 1)
        assert np.abs(carrier.gap[seen]).max() < 0.5 * spread
    assert np.isfinite(carrier.kernel).all()


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    carrier = carrier_of(tiny.bridge("llama"), 0, 1, tiny.tokens(), length=100)
    again = Carrier.load(carrier.save(tmp_path / "c.safetensors"))
    assert again.provenance == carrier.provenance and again.horizon == carrier.horizon
    np.testing.assert_array_equal(again.kernel, carrier.kernel)
    np.testing.assert_array_equal(again.qk_overlap, carrier.qk_overlap)
    assert len(carrier.to_frame()) == 100
    assert carrier.plot().get_ylabel().startswith("mean logit")
    assert "peak at offset" in str(carrier) and "<img" in carrier._repr_html_()
    assert carrier.provenance.head == 1 and carrier.provenance.tokens_shape == (3, 24)


BAD = {
    "head": ({"head": 4}, ValueError, r"head=4 .* has 0\.\.3"),
    "layer": ({"layer": 2}, ValueError, r"layer=2 .* has 0\.\.1"),
    "target too large": ({"target": 50}, ValueError, r"target=50 .* take one in 0\.\.49"),
    "target negative": ({"target": -1}, ValueError, r"target=-1 is not an offset"),
    "target a float": ({"target": 1.5}, TypeError, r"target=1\.5 is a float"),
    "length too small": ({"length": 1}, ValueError, r"length=1 leaves nothing"),
    "length a string": ({"length": "9"}, TypeError, r"length='9' is a str"),
}


@pytest.mark.bridge
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, unchecked):
    change, error, message = BAD[case]
    good = {"layer": 0, "head": 0, "tokens": tiny.tokens(), "length": 50}
    with pytest.raises(error, match=message):
        carrier_of(tiny.bridge("llama"), **{**good, **change})


@pytest.mark.bridge
def test_a_closed_form_asked_of_a_head_without_rotation_is_refused():
    with pytest.raises(ValueError, match=r"length=100 asks for the closed form .* length ≤ 24"):
        carrier_of(tiny.bridge("gpt2"), 0, 0, tiny.tokens(), length=100)


def test_a_layer_of_positions_is_named_by_the_host():
    assert host_of(build("none")).positions == "none"
