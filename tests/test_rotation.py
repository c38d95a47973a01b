"""The rotation: against plain NumPy, against complex arithmetic, and its invariance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenprobe.rotation import Rotation

pytestmark = pytest.mark.bridge


def rotate_reference(x, position, omega, adjacent):
    """Plain loops: pair m of x turned by ω_m · position."""
    out = x.copy()
    half = len(omega)
    for m, w in enumerate(omega):
        a, b = (2 * m, 2 * m + 1) if adjacent else (m, m + half)
        c, s = np.cos(w * position), np.sin(w * position)
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


@pytest.mark.parametrize("adjacent", [True, False])
def test_apply_is_the_plain_rotation(adjacent):
    generator = np.random.default_rng(0)
    omega = generator.uniform(0, 1, 5)
    x = generator.normal(size=(2, 7, 3, 14))
    rotation = Rotation.of(omega, adjacent=adjacent)
    turned = rotation.apply(torch.from_numpy(x), torch.arange(7) + 11).numpy()
    for index in np.ndindex(2, 7, 3):
        expected = rotate_reference(x[index], index[1] + 11, omega, adjacent)
        np.testing.assert_allclose(turned[index], expected, atol=1e-12)
    np.testing.assert_array_equal(rotation.unrotated_dims(14), np.arange(10, 14))


@settings(max_examples=30, deadline=None)
@given(shift=st.integers(0, 10**6), seed=st.integers(0, 100))
def test_products_depend_on_the_offset_alone(shift, seed):
    generator = np.random.default_rng(seed)
    rotation = Rotation.of(10000.0 ** -(np.arange(8) / 8), adjacent=True)
    q, k = (torch.from_numpy(generator.normal(size=(1, 5, 1, 16))) for _ in "qk")
    index = torch.arange(5)

    def products(positions):
        return torch.einsum(
            "bihd,bjhd->bij", rotation.apply(q, positions), rotation.apply(k, positions)
        )

    assert (products(index + shift) - products(index)).abs().max() < 1e-12


def test_float32_tables_lose_precision_as_hosts_do():
    rotation = Rotation.of(10000.0 ** -(np.arange(8) / 8), adjacent=True)
    far = torch.arange(10**5, 10**5 + 4)
    exact, host = (rotation.table(far, torch.float64, exact=e)[0] for e in (True, False))
    assert 1e-4 < (exact - host).abs().max() < 1e-1


def test_host_layout_repeats_each_pair():
    table = torch.tensor([[1.0, 2.0]])
    omega = np.ones(2)
    assert Rotation.of(omega, adjacent=True).host_layout(table).tolist() == [[1, 1, 2, 2]]
    assert Rotation.of(omega, adjacent=False).host_layout(table).tolist() == [[1, 2, 1, 2]]
