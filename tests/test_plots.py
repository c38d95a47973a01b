"""Plots: what is on the Axes, and that drawing leaves nothing behind."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from lenprobe.plots import (
    plot_accuracy,
    plot_alpha_quality,
    plot_carrier,
    plot_equivariance,
    plot_heatmap,
    plot_singular_values,
)

LENGTHS = np.array([16, 32, 64])
OFFSETS = np.arange(64)
KERNEL = np.cos(0.3 * (OFFSETS - 3))


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def fresh():
    return Figure(layout="constrained").subplots()


def test_accuracy_marks_new_lengths_and_chance() -> None:
    curves = {"rope": (LENGTHS, np.array([1.0, 0.9, 0.8])), "learned": (LENGTHS, np.ones(3))}
    given = fresh()
    ax = plot_accuracy(curves, train_length=16, chance=1 / 16, ax=given)
    assert ax is given
    assert legend(ax) == ["rope", "learned", "longer than trained", "chance (0.0625)"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["16", "32", "64"]
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1.0, 0.9, 0.8])
    assert "tokens" in ax.get_xlabel() and ax.get_ylabel() == "accuracy"


def test_accuracy_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="curves is empty"):
        plot_accuracy({})


def test_carrier_marks_target_and_horizon() -> None:
    ax = plot_carrier(OFFSETS, KERNEL, target=3, horizon=24, train_length=16, ax=fresh())
    assert legend(ax) == ["never trained", "closed form", "target, Δ = 3", "horizon, Δ = 24"]
    assert "tokens" in ax.get_xlabel() and "nats" in ax.get_ylabel()


@pytest.mark.parametrize("horizon", [None, float("inf"), 1000])
def test_carrier_draws_no_horizon_where_there_is_none_in_sight(horizon) -> None:
    ax = plot_carrier(OFFSETS, KERNEL, target=3, horizon=horizon, ax=fresh())
    assert not any("horizon" in text for text in legend(ax))


def test_carrier_of_measured_offsets_with_gaps() -> None:
    measured = np.where(OFFSETS < 32, KERNEL, np.nan)
    ax = plot_carrier(OFFSETS, KERNEL, measured=measured, ax=fresh())
    assert "measured" in legend(ax)
    ax.figure.savefig(io.BytesIO())


def test_singular_values_leave_out_rounding() -> None:
    ax = plot_singular_values({"a": np.array([4.0, 2.0, 1e-12]), "b": np.ones(5)}, ax=fresh())
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.0, 0.5])
    assert ax.get_yscale() == "log"


def test_equivariance_draws_zero_at_the_floor_and_keeps_gaps() -> None:
    errors = np.array([0.0, 1e-3, np.nan])
    ax = plot_equivariance(np.array([1, 10, 100]), {"float64": errors}, ax=fresh())
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1e-17, 1e-3, np.nan])
    ax.figure.savefig(io.BytesIO())


def test_heatmap_is_centred_on_zero_where_signed() -> None:
    values = np.array([[1.0, -3.0], [np.nan, 2.0]])
    ax = plot_heatmap(
        values,
        row_label="layer",
        column_label="head",
        value_label="logit (nats)",
        signed=True,
        row_ticks=["L0", "L1"],
        ax=fresh(),
    )
    assert ax.images[0].get_clim() == (-3.0, 3.0)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["L0", "L1"]
    ax.figure.savefig(io.BytesIO())


def test_a_script_without_pyplot_stays_without() -> None:
    code = (
        "import sys, numpy as np; from lenprobe.plots import plot_singular_values as p;"
        "ax = p({'a': np.ones(3)}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_with_pyplot_can_show_the_figure() -> None:
    code = (
        "import matplotlib; matplotlib.use('agg'); from matplotlib import pyplot;"
        "import numpy as np; from lenprobe.plots import plot_singular_values as p;"
        "ax = p({'a': np.ones(3)}); assert ax.figure.number in pyplot.get_fignums()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_alpha_quality_has_one_mark_an_encoding() -> None:
    alpha, quality = np.array([1.0, 0.0, 0.5]), np.array([0.9, 0.1, 0.4])
    ax = plot_alpha_quality(alpha, quality, ["rope", "none", "rope"], chance=0.0625, ax=fresh())
    assert legend(ax) == ["rope", "none", "chance"]
    assert [len(points.get_offsets()) for points in ax.collections] == [2, 1]
