"""Equivariance: exact for RoPE, absent for learned positions, on every host and at every dtype."""

import math

import numpy as np
import pytest
import tiny_models as tiny
import torch

from lenprobe import build, equivariance_of
from lenprobe.hosts import cast, host_of, untouched
from lenprobe.probes.equivariance import Equivariance, shift_error

SHIFTS = [1, 64, 4096, 10**6]


def rope(trained, request):
    return request.getfixturevalue("trained_rope") if trained else build("rope", n_heads=2)


@pytest.mark.bridge
@pytest.mark.parametrize("trained", [False, True])
def test_rope_depends_on_the_offset_alone(trained, request):
    model = rope(trained, request)
    result = equivariance_of(model, 0, 0, shifts=SHIFTS)
    assert result.errors["float64"] <= 1e-10
    assert result.errors["float32"] <= 1e-5
    assert result.errors["float16"] <= 5e-2 and result.errors["bfloat16"] <= 5e-1
    near = equivariance_of(model, 0, 0, shifts=[1, 64, 4096], dtypes=["float32"])
    assert near.host_errors["float32"] <= 5e-4
    assert result.host_errors["float32"] > 10 * near.host_errors["float32"]  # it grows with δ


@pytest.mark.bridge
@pytest.mark.parametrize("trained", [False, True])
def test_learned_positions_are_not_equivariant(trained, request):
    model = request.getfixturevalue("trained_learned") if trained else build("learned")
    result = equivariance_of(model, 0, 0)
    assert all(error >= 0.1 for error in result.errors.values())
    assert np.isnan(result.head_level).all()  # its q and k know no position of their own


@pytest.mark.parametrize("encoding", ["alibi", "t5", "none"])
def test_biases_of_the_offset_and_no_positions_are_equivariant(encoding):
    result = equivariance_of(build(encoding), 0, 0, shifts=[1, 10**6], dtypes=["float64"])
    assert result.errors["float64"] <= 1e-10


def test_sinusoids_are_not_equivariant_and_have_no_end():
    result = equivariance_of(build("sinusoidal"), 0, 0, shifts=[1, 10**4], dtypes=["float64"])
    assert result.errors["float64"] >= 0.1


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "neox", "gemma2", "gemma3", "qwen3"])
def test_rotary_bridges_are_equivariant_end_to_end_in_every_layer(name):
    model = tiny.bridge(name)
    for layer in (0, 1):
        result = equivariance_of(model, layer, 1, tiny.tokens(), shifts=SHIFTS)
        assert result.errors["float64"] <= 1e-10
        assert np.isfinite(result.head_level).all() and np.isfinite(result.end_to_end).all()


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
def test_absolute_bridges_are_not(name):
    result = equivariance_of(tiny.bridge(name), 0, 0, tiny.tokens(), dtypes=["float64"])
    assert result.errors["float64"] >= 0.1


@pytest.mark.bridge
def test_shift_error_against_plain_loops():
    generator = np.random.default_rng(0)
    before, after = generator.normal(size=(2, 2, 4, 4))
    mask = np.tril(np.ones((4, 4), dtype=bool))
    pairs = [(b, i, j) for b in range(2) for i in range(4) for j in range(i + 1)]
    largest = max(abs(after[p] - before[p]) for p in pairs)
    values = [before[p] for p in pairs]
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    masked = [torch.tensor(np.where(mask, x, -np.inf)) for x in (before, after)]
    assert shift_error(*masked) == pytest.approx(largest / spread, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shifted_tables_are_the_hosts_own_to_the_bit(dtype):
    model = build("rope")
    host, attn = host_of(model), model.blocks[0].attn
    with untouched(model), cast(model, dtype):
        for shift in (3, 1000, 3):
            with host.shifted(shift, 8, exact=False):
                swapped = attn.rotary_sin, attn.rotary_cos
            own = attn.calculate_sin_cos_rotary(
                model.cfg.rotary_dim, shift + 8, base=attn._rotary_base(), dtype=dtype
            )
            for table, expected in zip(swapped, own, strict=True):
                assert table.dtype == dtype and torch.equal(table, expected[shift:])


@pytest.mark.bridge
def test_weights_and_buffers_are_put_back():
    model = build("rope")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    equivariance_of(model, 0, 0, shifts=[5])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    result = equivariance_of(build("rope"), 0, 0, shifts=[1, 100], dtypes=["float64", "float32"])
    again = Equivariance.load(result.save(tmp_path / "e.safetensors"))
    np.testing.assert_array_equal(again.end_to_end, result.end_to_end)
    assert again.provenance == result.provenance and again.dtypes == ("float64", "float32")
    assert len(result.to_frame()) == 2 * 2 * 2 * 2
    assert result.plot().get_xlabel().startswith("shift")
    assert "float64 tables" in str(result) and "<img" in result._repr_html_()


BAD = {
    "no shifts": ({"shifts": []}, r"shifts=\[\]: pass one or more"),
    "negative": ({"shifts": [-1]}, r"shifts=\[-1\]"),
    "not whole": ({"shifts": [0.5]}, r"shifts=\[0\.5\]"),
    "dtype unknown": ({"dtypes": ["int8"]}, r"dtypes=\['int8'\]: name one or more of float64"),
    "dtype a string": ({"dtypes": "float32"}, r"dtypes='float32'.* in a list"),
    "beyond the table": ({"shifts": [10**6]}, r"shift=1000000 .* take shifts in 0\.\.240"),
}


@pytest.mark.bridge
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, unchecked):
    change, message = BAD[case]
    tokens = tiny.tokens(2, 16, d_vocab=16)
    with pytest.raises(ValueError, match=message):
        equivariance_of(build("learned", n_ctx=256), 0, 0, tokens, **change)


@pytest.mark.bridge
def test_tokens_that_fill_the_table_leave_no_shift():
    with pytest.raises(ValueError, match="no shift is possible"):
        equivariance_of(tiny.bridge("gpt2"), 0, 0, tiny.tokens(1, 128))
