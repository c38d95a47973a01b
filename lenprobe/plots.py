"""The pictures that results share: accuracy by length, a carrier, singular values, a heatmap.

Every function draws on ``ax`` and returns the Axes. Without ``ax`` it makes a figure of its own:
pyplot's where pyplot is in use or a notebook would show it, otherwise a plain ``Figure`` that
leaves nothing behind. Colours are those of Okabe and Ito, apart for the colour-blind too; markers
and dashes tell the lines apart in grey. Sizes are chosen to be read at 640 pixels.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, RED = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
)
GREY = "#666666"
CYCLE = (
    (BLUE, "o", "-"),
    (RED, "s", "--"),
    (GREEN, "^", "-."),
    (PINK, "D", ":"),
    (ORANGE, "v", "-"),
    (SKY, "P", "--"),
    ("#000000", "X", "-."),
    (GREY, "*", ":"),
)
"""Colour, marker and dash of the first, second, ... line of a plot."""

OFFSET_LABEL = "offset Δ = i − j (tokens)"
LOGIT_LABEL = "mean logit g(Δ) (nats)"


def plot_accuracy(
    curves: Mapping[str, tuple[Int[np.ndarray, " length"], Float[np.ndarray, " length"]]],
    *,
    train_length: int | None = None,
    chance: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Accuracy against sequence length, one line a head.

    >>> ax = plot_accuracy({"rope": (np.array([16, 32]), np.array([1.0, 0.9]))}, train_length=16)
    >>> ax.get_xlabel()
    'sequence length n (tokens)'

    Args:
        curves: for each name the lengths in tokens and the accuracies in [0, 1].
        train_length: longest length trained on; what lies beyond it is marked as new.
        chance: accuracy of guessing, drawn as a dotted line.
        ax: Axes to draw on; new ones where None.

    Raises:
        ValueError: there is no curve.
    """
    if not curves:
        raise ValueError("curves is empty; give at least one name with its lengths and accuracies")
    ax = _axes(ax)
    for (name, (lengths, accuracy)), (colour, marker, dash) in zip(
        curves.items(), _styles(len(curves)), strict=True
    ):
        ax.plot(lengths, accuracy, dash, color=colour, marker=marker, label=name, zorder=3)
    ax.set_xscale("log", base=2)
    _length_ticks(ax, np.unique(np.concatenate([lengths for lengths, _ in curves.values()])))
    if train_length is not None:
        right = ax.get_xlim()[1]
        ax.axvspan(train_length, right, color=GREY, alpha=0.1, lw=0, label="longer than trained")
        ax.set_xlim(right=right)
    if chance is not None:
        ax.axhline(chance, color=GREY, ls=":", lw=1, label=f"chance ({chance:.3g})")
    ax.set(xlabel="sequence length n (tokens)", ylabel="accuracy", ylim=(-0.03, 1.05))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8)
    return _tidy(ax)


def plot_carrier(
    offsets: Int[np.ndarray, " offset"],
    kernel: Float[np.ndarray, " offset"],
    *,
    measured: Float[np.ndarray, " offset"] | None = None,
    target: int | None = None,
    horizon: int | float | None = None,
    train_length: int | None = None,
    name: str = "closed form",
    ax: "Axes | None" = None,
) -> "Axes":
    """A carrier g(Δ) with its target and its horizon marked.

    >>> ax = plot_carrier(np.arange(8), np.cos(np.arange(8.0) - 3), target=3)
    >>> ax.get_ylabel()
    'mean logit g(Δ) (nats)'

    Args:
        offsets: Δ, in tokens.
        kernel: g(Δ), in nats, by the closed form or, for a head with none, as measured.
        measured: mean logit of each diagonal, drawn as dots; NaN where unknown.
        target: offset that the head is meant to pick.
        horizon: first offset past training whose carrier reaches the target's; infinite or None
            where there is none.
        train_length: offsets from here on were never trained; shaded.
        name: what the line is, for the legend.
        ax: Axes to draw on; new ones where None.
    """
    ax = _axes(ax)
    if train_length is not None and train_length <= offsets[-1]:
        ax.axvspan(train_length, offsets[-1], color=GREY, alpha=0.1, lw=0, label="never trained")
    if measured is not None:
        ax.plot(offsets, measured, ".", color=ORANGE, ms=5, label="measured")
    ax.plot(offsets, kernel, "-", color=BLUE, lw=1.4, label=name, zorder=3)
    if target is not None and np.any(offsets == target):
        height = float(kernel[offsets == target][0])
        ax.axhline(height, color=GREEN, ls=":", lw=1, zorder=2)
        ax.plot(
            [target], [height], "*", color=GREEN, ms=12, zorder=4, label=f"target, Δ = {target}"
        )
    if horizon is not None and np.isfinite(horizon) and horizon <= offsets[-1]:
        ax.axvline(horizon, color=RED, ls="--", lw=1.2, label=f"horizon, Δ = {horizon:.0f}")
    ax.set(xlabel=OFFSET_LABEL, ylabel=LOGIT_LABEL)
    ax.margins(x=0.01)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8)
    return _tidy(ax)


def plot_singular_values(
    curves: Mapping[str, Float[np.ndarray, " rank"]],
    *,
    floor: float = 1e-6,
    ax: "Axes | None" = None,
) -> "Axes":
    """Singular values over the largest one, one line a matrix, on a logarithmic axis.

    >>> ax = plot_singular_values({"rope": np.array([4.0, 2.0, 1.0])})
    >>> ax.get_yscale()
    'log'

    Args:
        curves: for each name its singular values, largest first; not all zero.
        floor: ratio below which values are rounding and are left out.
        ax: Axes to draw on; new ones where None.
    """
    from matplotlib.ticker import MaxNLocator

    ax = _axes(ax)
    for (name, values), (colour, marker, dash) in zip(
        curves.items(), _styles(len(curves)), strict=True
    ):
        ratio = values / values[0] if values[0] > 0 else values
        kept = ratio[ratio > floor]
        index = np.arange(1, len(kept) + 1)
        ax.plot(index, kept, dash, color=colour, marker=marker, ms=4, lw=1.2, label=name)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="index of the singular value", ylabel="singular value / largest")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8)
    return _tidy(ax)


def plot_equivariance(
    shifts: Int[np.ndarray, " shift"],
    curves: Mapping[str, Float[np.ndarray, " shift"]],
    *,
    floor: float = 1e-17,
    ax: "Axes | None" = None,
) -> "Axes":
    """Equivariance error against the shift of positions, on logarithmic axes.

    >>> ax = plot_equivariance(np.array([1, 10]), {"float32": np.array([1e-7, 1e-6])})
    >>> ax.get_yscale()
    'log'

    Args:
        shifts: δ, in tokens.
        curves: for each name the error at each shift, in units of the logits' spread.
        floor: errors below it, exact zeros too, are drawn there.
        ax: Axes to draw on; new ones where None.
    """
    ax = _axes(ax)
    for (name, errors), (colour, marker, dash) in zip(
        curves.items(), _styles(len(curves)), strict=True
    ):
        ax.plot(
            shifts, np.maximum(errors, floor), dash, color=colour, marker=marker, ms=4, label=name
        )
    ax.set(
        xscale="log", yscale="log", xlabel="shift δ (tokens)", ylabel="max |Δ logit| / std(logits)"
    )
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8)
    return _tidy(ax)


def plot_forecast(
    lengths: Int[np.ndarray, " length"],
    curves: Mapping[str, tuple[Float[np.ndarray, " length"], Float[np.ndarray, " length"]]],
    *,
    train_length: int | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Shares against sequence length: a line for what was forecast, marks for what was measured.

    >>> n, share = np.array([16, 32]), np.array([1.0, 0.5])
    >>> plot_forecast(n, {"accuracy": (share, share)}).get_xlabel()
    'sequence length n (tokens)'

    Args:
        lengths: n, in tokens.
        curves: by name, the forecast and the measurement (NaN for none), in 0..1.
        train_length: shades what is longer.
        ax: where to draw; new axes by default.
    """
    ax = _axes(ax)
    for (name, (forecast, measured)), (colour, marker, dash) in zip(
        curves.items(), _styles(len(curves)), strict=True
    ):
        ax.plot(lengths, forecast, dash, color=colour, label=f"{name}, forecast")
        label = f"{name}, measured"
        ax.plot(lengths, measured, marker, color=colour, mfc="none", ms=8, label=label)
    ax.set_xscale("log", base=2)
    _length_ticks(ax, lengths)
    if train_length is not None:
        right = ax.get_xlim()[1]
        ax.axvspan(train_length, right, color=GREY, alpha=0.1, lw=0, label="longer than trained")
        ax.set_xlim(right=right)
    ax.set(xlabel="sequence length n (tokens)", ylabel="share", ylim=(-0.03, 1.05))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8)
    return _tidy(ax)


def plot_heatmap(
    values: Float[np.ndarray, "row column"],
    *,
    row_label: str,
    column_label: str,
    value_label: str,
    signed: bool = False,
    row_ticks: list[str] | None = None,
    column_ticks: list[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """A matrix in colour with its scale; NaN cells stay grey.

    >>> ax = plot_heatmap(np.eye(3), row_label="query", column_label="key", value_label="pattern")
    >>> ax.get_ylabel()
    'query'

    Args:
        values: the matrix; NaN is drawn as missing.
        row_label: what a row is, with its unit.
        column_label: what a column is, with its unit.
        value_label: what the colour shows, with its unit.
        signed: centres a two-sided colour scale on zero; otherwise one-sided.
        row_ticks: a name for every row; numbers where None.
        column_ticks: a name for every column; numbers where None.
        ax: Axes to draw on; new ones where None.
    """
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    ax = _axes(ax)
    colours = matplotlib.colormaps["RdBu_r" if signed else "viridis"].with_extremes(bad="#dddddd")
    finite = values[np.isfinite(values)]
    bound = float(np.abs(finite).max()) if signed and finite.size else None
    image = ax.imshow(
        values,
        cmap=colours,
        vmin=None if bound is None else -bound,
        vmax=bound,
        aspect="auto",
        interpolation="nearest",
    )
    ax.figure.colorbar(image, ax=ax, label=value_label)
    ax.set(xlabel=column_label, ylabel=row_label)
    for axis, ticks in ((ax.yaxis, row_ticks), (ax.xaxis, column_ticks)):
        if ticks is None:
            axis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_ticks(range(len(ticks)), ticks)
    return ax


def plot_alpha_quality(
    alpha: Float[np.ndarray, " pair"],
    quality: Float[np.ndarray, " pair"],
    encodings: list[str],
    *,
    chance: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Accuracy of trained models against α, one mark a task and encoding.

    >>> plot_alpha_quality(np.array([1.0]), np.array([0.9]), ["rope"]).get_xlabel()
    'α, computed without training'

    Args:
        alpha: of each pair.
        quality: mean accuracy of its models beyond the training length.
        encodings: the encoding of each pair; pairs of one share a mark.
        chance: accuracy of guessing.
        ax: drawn on; new ones by default.
    """
    ax = _axes(ax)
    names = list(dict.fromkeys(encodings))
    for name, (colour, marker, _) in zip(names, _styles(len(names)), strict=True):
        own = np.array([each == name for each in encodings])
        ax.scatter(alpha[own], quality[own], color=colour, marker=marker, label=name, zorder=3)
    if chance is not None:
        ax.axhline(chance, color=GREY, ls=":", label="chance")
    ax.set(xlabel="α, computed without training", ylabel="accuracy of new queries")
    ax.set(xlim=(-0.04, 1.04), ylim=(0, 1.04))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return _tidy(ax)


def _axes(ax: "Axes | None", size: tuple[float, float] = (6.4, 3.6)) -> "Axes":
    """``ax``, or new ones: on a figure of pyplot's where the user would look for it there."""
    if ax is not None:
        return ax
    if "matplotlib.pyplot" in sys.modules or "ipykernel" in sys.modules:
        from matplotlib import pyplot

        return pyplot.subplots(figsize=size, layout="constrained")[1]
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots()


def _styles(n: int) -> list[tuple[str, str, str]]:
    return [CYCLE[index % len(CYCLE)] for index in range(n)]


def _length_ticks(ax: "Axes", lengths: Int[np.ndarray, " length"]) -> None:
    """Labels exactly the lengths measured, and no powers of two in between."""
    from matplotlib.ticker import NullLocator

    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())


def _tidy(ax: "Axes") -> "Axes":
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, lw=0.6)
    ax.set_axisbelow(True)
    return ax
