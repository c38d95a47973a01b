"""How attention to the target thins out as sequences grow, and what that does to accuracy.

With g the carrier, a head that knows positions alone puts on the key d places back

    p_d(n) = e^{g(d)} / Σ_{Δ<n} e^{g(Δ)}                                       (exact law).

Contents add to each logit: with σ²(Δ) its variance over keys, each term is multiplied by
``e^{σ²(Δ)/2}``, the mean of e^s for normal s (law with content). The query's own content is shared
by its whole row and cancels in the softmax, so means and variances are taken over keys, given the
query, and the law is averaged over queries; at Δ = 0 a query meets its own key. A summary, which
under-predicts: ``p = 1 / (1 + (n − 1) e^{−m})`` with m the margin, half at ``n = 1 + e^m``.

The law divides one mean by another, which is off by some per cent where few keys carry most of the
mass; the simulation below gives the mean of the ratio, ``simulated_mass``.

Target mass is not accuracy: top-1 can be 1.0 at a mass of 0.2, since the target only has to beat
the largest sum of other mass on one token. The accuracy forecast simulates just that: sequences of
random contents are drawn from the queries and keys read on short sequences, their logits follow
from the rotation, and the tokens' masses are read out. No model is run at the lengths forecast.

The claim tested is that of arXiv 2607.18759 (accuracy decays by dilution). Definition: ours.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.contents import Contents, contents_of
from lenprobe.hosts import Host
from lenprobe.nulls import HeadReading, read_with_null
from lenprobe.probes.carrier import closed_form, diagonal_means, evaluate
from lenprobe.probes.decomposition import relative_part
from lenprobe.reading import LayerReading, provenance, random_tokens, read, train_length_of
from lenprobe.readout import Readout, readout_of
from lenprobe.results import Result
from lenprobe.tasks import FixedOffset
from lenprobe.training import accuracy_by_length

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_QUERIES, _KEYS = 512, 256  # drawn for the law with content
_FLOATS = 2**22  # logits held at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Dilution(Result):
    """Target mass and accuracy by length: laws, forecast, measured."""

    target: int
    """The offset d."""
    train_length: int
    lengths: Int[np.ndarray, " length"]
    """Tokens a sequence; figures are those of the last query."""
    exact_law: Float[np.ndarray, " length"]
    """Target mass by position alone."""
    content_law: Float[np.ndarray, " length"]
    """Target mass with content."""
    simulated_mass: Float[np.ndarray, " length"]
    """Target mass over simulated contents."""
    measured_mass: Float[np.ndarray, " length"]
    """Target mass of the model; NaN beyond its longest sequence."""
    forecast: Float[np.ndarray, " length"]
    """Accuracy forecast by simulation."""
    measured_accuracy: Float[np.ndarray, " length"]
    """Accuracy of the model at the last query; NaN beyond its longest sequence."""
    margin: float
    """m: g(target) minus the largest other g at the trained offsets, in nats."""
    half_length: float
    """First length at which the law with content falls below one half; infinite for none."""
    null_mass: Float[np.ndarray, " length"]
    """The exact law of the same head at random initialisation."""

    @property
    def one_margin(self) -> Float[np.ndarray, " length"]:
        """1 / (1 + (n − 1) e^{−m}): the summary, which under-predicts."""
        return 1 / (1 + (self.lengths - 1) * np.exp(-self.margin))

    @property
    def found(self) -> bool:
        """Whether the target gets more than half of the mass at the length trained on."""
        return self.half_length > self.train_length

    def summary(self) -> str:
        """Half length, mass and accuracy at the longest length."""
        if self.half_length <= self.target + 1:
            half = "never half of the mass"
        elif math.isinf(self.half_length):
            half = f"more than half of the mass up to length {self.lengths.max()}"
        else:
            half = f"less than half of the mass from length {self.half_length:.0f} on"
        return (
            f"dilution at offset {self.target}: {half}; margin {self.margin:.2f} nats\n"
            f"target mass (law with content / measured): {_pairs(self, 'content_law')}\n"
            f"accuracy (forecast / measured): {_pairs(self, 'forecast')}"
        )

    def to_frame(self) -> "pd.DataFrame":
        """One row a length."""
        import pandas as pd

        names = ("lengths", "exact_law", "content_law", "simulated_mass", "one_margin")
        more = ("measured_mass", "forecast", "measured_accuracy", "null_mass")
        return pd.DataFrame({name: getattr(self, name) for name in (*names, *more)})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Mass and accuracy by length, forecast as lines and measured as points."""
        from lenprobe.plots import plot_forecast

        return plot_forecast(
            self.lengths,
            {
                "target mass": (self.simulated_mass, self.measured_mass),
                "accuracy": (self.forecast, self.measured_accuracy),
            },
            train_length=self.train_length,
            ax=ax,
        )


def dilution_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    target: int | None = None,
    lengths: Iterable[int] | None = None,
    sequences: int | None = None,
    seed: int = 0,
) -> Dilution:
    """How a head's attention to one offset dilutes with the length, and the accuracy it leaves.

    >>> from lenprobe.planted import carrier
    >>> found = dilution_of(carrier(3).model, 0, 0, lengths=[16, 64], sequences=32)
    >>> bool(abs(found.exact_law - found.measured_mass).max() < 1e-9)
    True

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: contents to draw from, int64 [batch, pos]; uniform random ones by default.
        target: the offset d; the carrier's peak at trained offsets by default.
        lengths: n; 1, 2, 4, 8 and 16 times the training length by default. Any for a head that
            rotates; up to the tokens' length for others.
        sequences: simulated and measured, a length; 2,048 by default, 8 for large models.
        seed: of tokens and draws.

    Raises:
        ValueError, TypeError: bad layer, head, tokens, target or lengths.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    both = read_with_null(model, layer, head, tokens, seed=seed)
    host, reading = both.host, both.trained
    trained = train_length_of(host, both.tokens)
    contents = contents_of(host, reading, both.tokens)
    reach = None if reading.rotation is not None else both.tokens.shape[1]
    wanted = _check_lengths(lengths, trained, reach)
    longest = int(wanted.max())
    kernel = _kernel(reading, longest)
    target = _check_target(target, kernel, trained, wanted)
    draws = _draws(host, sequences)
    rows = _rows(contents, reading, kernel, longest, seed)
    masses = _mass_by_length(rows, target)
    forecast, simulated = simulate(
        contents, rows, readout_of(host), target, wanted, draws, host, seed
    )
    mass, accuracy = _measured(model, both, target, wanted, draws, seed)
    below = np.flatnonzero(masses[target:] < 0.5)
    return Dilution(
        provenance=provenance(
            "dilution_of", host, reading, both.tokens, seed=seed, sequences=draws
        ),
        target=target,
        train_length=trained,
        lengths=wanted,
        exact_law=_mass_by_length(kernel[None], target)[wanted - 1],
        content_law=masses[wanted - 1],
        simulated_mass=simulated,
        measured_mass=mass,
        forecast=forecast,
        measured_accuracy=accuracy,
        margin=_margin(kernel, target, trained),
        half_length=float(below[0] + target + 1) if below.size else math.inf,
        null_mass=_mass_by_length(_kernel(both.random, longest)[None], target)[wanted - 1],
    )


# --- laws ---------------------------------------------------------------------------------------


def _mass_by_length(
    rows: Float[np.ndarray, "query offset"], target: int
) -> Float[np.ndarray, " length"]:
    """e^{x(d)} / Σ_{Δ<n} e^{x(Δ)} for n = 1, 2, ..., averaged over queries; 0 where n ≤ d.

    >>> _mass_by_length(np.zeros((1, 4)), 1).tolist()
    [0.0, 0.5, 0.3333333333333333, 0.25]
    """
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    mass: np.ndarray = (weights[:, target, None] / np.cumsum(weights, axis=1)).mean(axis=0)
    mass[:target] = 0.0
    return mass


def _rows(
    contents: Contents | None,
    reading: LayerReading,
    kernel: Float[np.ndarray, " offset"],
    length: int,
    seed: int,
) -> Float[np.ndarray, "query offset"]:
    """The exponents of the law with content, a row a query: mean logit + half its variance."""
    if contents is None:
        return (kernel + _content_variance(reading)[:length] / 2)[None]
    generator = np.random.default_rng(seed)
    query = generator.integers(len(contents.tokens), size=_QUERIES)
    key = generator.integers(len(contents.tokens), size=_KEYS)
    mean, variance = contents.moments(query, key, length)
    return mean + variance / 2


def _kernel(reading: LayerReading, length: int) -> Float[np.ndarray, " offset"]:
    """The carrier at offsets 0 .. length − 1: closed form, or the measured relative part."""
    if reading.rotation is not None and reading.q is not None:
        kernel = evaluate(*closed_form(reading), length)
        cap = reading.soft_cap
        return kernel if cap is None else cap * np.tanh(kernel / cap)
    visible = reading.visible.cpu().numpy()
    mean = reading.logits[:, 0].double().mean(dim=0).cpu().numpy()
    return relative_part(np.where(visible, mean, 0.0), visible)[:length]


def _content_variance(reading: LayerReading) -> Float[np.ndarray, " offset"]:
    """σ²(Δ): the variance over contents of the logit, averaged along each diagonal."""
    visible = reading.visible.cpu().numpy()
    logits = reading.logits[:, 0].double().cpu().numpy()
    variance = np.where(visible, np.where(visible, logits, 0.0).var(axis=0), 0.0)
    return diagonal_means(variance, visible)


def _margin(kernel: Float[np.ndarray, " offset"], target: int, trained: int) -> float:
    others = np.delete(kernel[: max(trained, target + 1)], target)
    return float(kernel[target] - others.max())


# --- forecast and measurement -------------------------------------------------------------------


def simulate(
    contents: Contents | None,
    rows: Float[np.ndarray, "query offset"],
    readout: Readout,
    target: int,
    lengths: Int[np.ndarray, " length"],
    draws: int,
    host: Host,
    seed: int,
) -> tuple[Float[np.ndarray, " length"], Float[np.ndarray, " length"]]:
    """The share of drawn sequences whose last query reads the target's token out; target mass.

    Args:
        contents: to draw queries and keys from; where None, the logits are those of the rows.
        rows: exponents by offset.
        readout: from the mass on each token to the answer.
        target: the offset d.
        lengths: n, each simulated apart.
        draws: sequences a length.
        host: gives the vocabulary.
        seed: of the draws.
    """
    accuracy, mass = np.zeros((2, len(lengths)))
    for index, length in enumerate(lengths.tolist()):
        if length <= target:
            continue
        generator = np.random.default_rng([seed, length])
        step = max(1, _FLOATS // (length * max(host.d_head, 1)))
        for at in range(0, draws, step):
            size = (min(step, draws - at), length)
            pattern, tokens = _drawn(contents, rows, size, host, generator)
            right = readout.answers(pattern, tokens) == tokens[:, target]
            accuracy[index] += right.sum() / draws
            mass[index] += pattern[:, target].sum() / draws
    return accuracy, mass


def _drawn(
    contents: Contents | None,
    rows: Float[np.ndarray, "query offset"],
    size: tuple[int, int],
    host: Host,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Pattern and tokens of the last query of drawn sequences; column Δ is the key Δ back."""
    if contents is None:
        tokens = generator.integers(host.d_vocab, size=size)
        logits = np.broadcast_to(rows[:1, : size[1]], size)
    else:
        key = generator.integers(len(contents.tokens), size=size)
        tokens = contents.tokens[key]
        logits = contents.logits(key[:, 0], key)
    pattern = np.exp(logits - logits.max(axis=1, keepdims=True))
    return pattern / pattern.sum(axis=1, keepdims=True), tokens


def _measured(
    model: Any,
    both: HeadReading,
    target: int,
    lengths: Int[np.ndarray, " length"],
    draws: int,
    seed: int,
) -> tuple[Float[np.ndarray, " length"], Float[np.ndarray, " length"]]:
    """Target mass and accuracy of the model, NaN at lengths that it cannot take."""
    host, reading = both.host, both.trained
    mass, accuracy = np.full((2, len(lengths)), np.nan)
    task = FixedOffset(target, d_vocab=host.d_vocab)
    for index, length in enumerate(lengths.tolist()):
        if not target < length <= host.n_ctx:
            continue
        tokens = random_tokens(host.d_vocab, draws, length, seed + 1)
        step = max(1, _FLOATS // (host.n_heads * length**2))
        parts = [
            read(model, part, reading.layer, reading.heads).pattern[:, 0, -1, length - 1 - target]
            for part in torch.split(tokens, step)
        ]
        mass[index] = float(torch.cat(parts).double().mean())
        found = accuracy_by_length(model, task, [length], sequences=draws, seed=seed + 1)
        accuracy[index] = found.last_query[0]
    return mass, accuracy


def _draws(host: Host, sequences: int | None) -> int:
    if sequences is None:
        large = sum(p.numel() for p in host.model.parameters()) > 10**7
        return 8 if large else 2048
    if sequences < 1:
        raise ValueError(f"sequences={sequences} simulates nothing; take 1 or more")
    return sequences


def _check_lengths(
    lengths: Iterable[int] | None, trained: int, reach: int | None
) -> Int[np.ndarray, " length"]:
    if lengths is None:
        every = [times * trained for times in (1, 2, 4, 8, 16)]
        found = [n for n in every if reach is None or n <= reach] or [int(reach or trained)]
    else:
        found = [int(length) for length in lengths]
    if not found or min(found) < 2:
        raise ValueError(f"lengths={found}: give one or more lengths of 2 or more tokens")
    if reach is not None and max(found) > reach:
        raise ValueError(
            f"lengths holds {max(found)}, but this head does not rotate, so its logits are known "
            f"up to the {reach} tokens read; take lengths ≤ {reach}, or longer tokens"
        )
    return np.array(found)


def _check_target(
    target: int | None, kernel: Float[np.ndarray, " offset"], trained: int, lengths: np.ndarray
) -> int:
    if target is None:
        return int(np.argmax(kernel[:trained]))
    if isinstance(target, bool) or not isinstance(target, int | np.integer):
        raise TypeError(f"target={target!r} is a {type(target).__name__}; pass an offset in tokens")
    longest = int(lengths.max())
    if not 0 <= target < longest:
        raise ValueError(
            f"target={target} is not an offset in sequences of lengths up to {longest}; take one "
            f"in 0..{longest - 1}"
        )
    return int(target)


def _pairs(result: Dilution, name: str) -> str:
    measured = {"content_law": "measured_mass", "forecast": "measured_accuracy"}[name]
    triples = zip(result.lengths, getattr(result, name), getattr(result, measured), strict=True)
    return ", ".join(
        f"{a:.2f}/{'–' if math.isnan(b) else f'{b:.2f}'} at {n}" for n, a, b in triples
    )
