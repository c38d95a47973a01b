"""By what function of the offset does a head pick its key: the carrier.

RoPE turns pair m of the head's dimensions by ω_m a position. With q_m, k_m the unrotated pair as
complex numbers, the logit is ``scale · [Re Σ_m conj(q_m(i)) k_m(j) exp(iω_m(j − i)) + rest]``, and
its mean over contents is the carrier

    g(Δ) = Σ_m A_m cos(ω_m Δ + φ_m) + A_0,      Δ = i − j,

with ``A_m exp(−iφ_m) = scale · conj(mean q_m) mean k_m`` and A_0 from the dimensions that do not
turn. That is the closed form: it needs no n² memory and reaches any offset. The measured carrier
is the mean of each diagonal of the logits. The two differ by what the contents at i and j share,
and at Δ = 0, where they are the same token. Heads that do not rotate have a measured carrier
alone: the relative part r(Δ) of their positional kernel.

The claim tested is that of arXiv 2607.18759: the learned rotary rule is a low-rank carrier aligned
with the target. Definition: ours.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lenprobe.hosts import Host, host_of
from lenprobe.probes.decomposition import relative_part
from lenprobe.reading import (
    LayerReading,
    check_head,
    check_tokens,
    default_tokens,
    provenance,
    read,
    train_length_of,
)
from lenprobe.results import Result
from lenprobe.rotation import Rotation

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LENGTH = 1024  # offsets of the closed form where none are asked for
_GRID = 64  # the carrier matrix is at least this large


@dataclass(frozen=True, kw_only=True, eq=False)
class Carrier(Result):
    """The carrier of one head; what is derived from it are properties."""

    offsets: Int[np.ndarray, " offset"]
    """0 .. length − 1."""
    kernel: Float[np.ndarray, " offset"]
    """g(Δ): the closed form, or the measured relative part of a head that does not rotate."""
    measured: Float[np.ndarray, " offset"]
    """Mean of each diagonal of the logits; NaN beyond the tokens' length."""
    amplitudes: Float[np.ndarray, " pair"]
    """A_m ≥ 0, in logits; empty for heads that do not rotate."""
    phases: Float[np.ndarray, " pair"]
    """φ_m in (−π, π], radians."""
    frequencies: Float[np.ndarray, " pair"]
    """ω_m, radians a position."""
    constant: float
    """A_0, the part that no offset changes."""
    target: int
    """The offset asked about: given, or the peak."""
    train_length: int
    """Offsets below it were trained on; the length of the tokens where the model knows none."""
    singular_values: Float[np.ndarray, " rank"]
    """Of the carrier matrix G[i, j] = g(i − j), largest first."""
    qk_singular_values: Float[np.ndarray, " direction"] | None
    """Of W_Q R_target W_Kᵀ, biases folded in; None where q and k are not affine in the input."""
    qk_overlap: Float[np.ndarray, " side"] | None
    """|cosine| of its top singular pair (query side, key side) with the mean residual direction."""

    @property
    def wavelengths(self) -> Float[np.ndarray, " pair"]:
        """2π/ω_m, in tokens."""
        return 2 * np.pi / self.frequencies

    @property
    def has_closed_form(self) -> bool:
        """Whether the head rotates, so that the kernel is the closed form."""
        return len(self.amplitudes) > 0

    @property
    def _in_range(self) -> Float[np.ndarray, " trained"]:
        return self.kernel[: self.train_length]

    @property
    def peak(self) -> int:
        """Δ of the largest kernel among the trained offsets 0 .. train_length − 1."""
        return int(np.argmax(self._in_range))

    @property
    def margin(self) -> float:
        """g(target) minus the largest kernel at any other trained offset, in logits."""
        others = np.delete(self._in_range, self.target) if self._target_trained else self._in_range
        return float(self.kernel[self.target] - others.max())

    @property
    def _target_trained(self) -> bool:
        return self.target < self.train_length

    @property
    def percentile(self) -> float:
        """Share of the trained offsets whose kernel is at most g(target), in percent."""
        return float(100 * np.mean(self._in_range <= self.kernel[self.target]))

    @property
    def alignment(self) -> float:
        """Phase alignment Σ A_m cos(ω_m d + φ_m) / Σ A_m at the target d; NaN without rotation."""
        total = self.amplitudes.sum()
        if not total > 0:
            return math.nan
        return float(self._waves(self.target) @ self.amplitudes / total)

    def _waves(self, offset: int) -> Float[np.ndarray, " pair"]:
        return np.cos(self.frequencies * offset + self.phases)

    @property
    def horizon(self) -> float:
        """Smallest untrained Δ whose kernel reaches g(target); infinite where there is none.

        Up to it attention dilution alone rules; past it a side lobe competes.
        """
        beyond = self.kernel[self.train_length :]
        reached = np.flatnonzero(beyond >= self.kernel[self.target])
        return float(self.train_length + reached[0]) if len(reached) else math.inf

    @property
    def gap(self) -> Float[np.ndarray, " offset"]:
        """Measured minus closed form, at each offset; NaN where nothing was measured."""
        return self.measured - self.kernel

    @property
    def correlation(self) -> float:
        """Of the closed form with the measured carrier over the offsets Δ ≥ 1."""
        seen = np.isfinite(self.measured) & (self.offsets >= 1)
        if not self.has_closed_form or seen.sum() < 3 or np.ptp(self.measured[seen]) == 0:
            return math.nan
        return float(np.corrcoef(self.kernel[seen], self.measured[seen])[0, 1])

    def _energy(self) -> Float[np.ndarray, " rank"]:
        energy = self.singular_values**2
        return energy / max(energy.sum(), np.finfo(float).tiny)

    @property
    def participation_rank(self) -> float:
        """(Σσ²)² / Σσ⁴ of the carrier matrix."""
        return float(1 / max((self._energy() ** 2).sum(), np.finfo(float).tiny))

    @property
    def entropy_rank(self) -> float:
        """Exp of the entropy of the shares of σ²."""
        share = self._energy()
        return float(np.exp(-np.sum(share * np.log(np.where(share > 0, share, 1.0)))))

    @property
    def rank_95(self) -> int:
        """How many singular values hold 95 % of the energy Σσ²."""
        return self._rank(0.95)

    @property
    def rank_99(self) -> int:
        """How many singular values hold 99 % of the energy Σσ²."""
        return self._rank(0.99)

    def _rank(self, share: float) -> int:
        return int(np.searchsorted(np.cumsum(self._energy()), share - 1e-12) + 1)

    def summary(self) -> str:
        """Peak and alignment, horizon, rank and agreement, in three lines."""
        kind = "closed form" if self.has_closed_form else "measured relative part"
        reach = f"{self.offsets[-1] + 1} offsets"
        horizon = (
            f"none within {reach}" if math.isinf(self.horizon) else f"at offset {self.horizon:.0f}"
        )
        aligned = f", phase alignment {self.alignment:.3f}" if self.has_closed_form else ""
        agree = f"; measured r = {self.correlation:.5f}" if self.has_closed_form else ""
        return (
            f"carrier ({kind}): peak at offset {self.peak}, target {self.target} "
            f"with margin {self.margin:.3f}{aligned}\n"
            f"horizon: {horizon} (trained below {self.train_length})\n"
            f"rank at 99 % of the energy: {self.rank_99}, "
            f"participation rank {self.participation_rank:.1f}{agree}"
        )

    def to_frame(self) -> "pd.DataFrame":
        """One row an offset: kernel, measured, gap."""
        import pandas as pd

        return pd.DataFrame(
            {
                "offset": self.offsets,
                "kernel": self.kernel,
                "measured": self.measured,
                "gap": self.gap,
            }
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The carrier with its target and horizon, up to a little past the horizon."""
        from lenprobe.plots import plot_carrier

        reach = 8 * self.train_length
        if math.isfinite(self.horizon):
            reach = max(reach, int(1.25 * self.horizon))
        seen = slice(0, reach)
        return plot_carrier(
            self.offsets[seen],
            self.kernel[seen],
            measured=self.measured[seen] if np.isfinite(self.measured).any() else None,
            target=self.target,
            horizon=self.horizon,
            train_length=self.train_length,
            name="closed form" if self.has_closed_form else "relative part r(Δ)",
            ax=ax,
        )


def carrier_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    length: int | None = None,
    target: int | None = None,
    seed: int = 0,
) -> Carrier:
    """The carrier of one head.

    >>> from lenprobe import build, carrier_of
    >>> carrier = carrier_of(build("rope"), layer=0, head=0, length=300, target=3)
    >>> carrier.kernel.shape, carrier.target
    ((300,), 3)

    Args:
        model: a HookedTransformer or TransformerBridge.
        layer: 0-based.
        head: 0-based.
        tokens: contents to average over, int64 [batch, pos]; uniform random ones by default, which
            say nothing about position.
        length: how many offsets the kernel has; 1,024 or more by default for heads that rotate, the
            tokens' length for those that do not.
        target: offset to measure alignment, margin and horizon at; the peak by default.
        seed: of the default tokens.

    Raises:
        ValueError: bad layer, head or tokens; ``target`` not below ``length``; ``length`` beyond
            the tokens for a head with no rotation, which has no closed form.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    host = host_of(model)
    head = check_head(host, head)
    tokens = default_tokens(host, seed) if tokens is None else tokens
    tokens = check_tokens(host, tokens)
    reading = read(model, tokens, layer, [head])
    return carrier_from(host, reading, tokens, length=length, target=target, seed=seed)


def carrier_from(
    host: Host,
    reading: LayerReading,
    tokens: Int[Tensor, "batch pos"],
    *,
    length: int | None = None,
    target: int | None = None,
    seed: int | None = None,
) -> Carrier:
    """:func:`carrier_of` on one head that has been read already."""
    n = tokens.shape[1]
    trained = train_length_of(host, tokens)
    rotates = reading.rotation is not None and reading.q is not None
    length = _check_length(host, reading, length, n, trained, rotates=rotates)
    logits, visible = reading.logits[:, 0].double().cpu().numpy(), reading.visible.cpu().numpy()
    mean = np.where(visible, logits.mean(axis=0), 0.0)
    if rotates:
        parts = closed_form(reading)
        kernel = evaluate(*parts, length)
        if reading.soft_cap is not None:
            kernel = reading.soft_cap * np.tanh(kernel / reading.soft_cap)
        grid = _toeplitz(*parts, max(_GRID, n))
    else:
        parts = (np.zeros(0), np.zeros(0), np.zeros(0), 0.0)
        kernel = relative_part(mean, visible)[:length]
        kernel = kernel[np.isfinite(kernel)]  # a window hides the offsets beyond it
        length = len(kernel)
        grid = _observed_block(kernel)
    _check_target(target, length)
    measured = np.full(length, np.nan)
    diagonals = diagonal_means(mean, visible)[:length]
    measured[: len(diagonals)] = diagonals
    target = int(np.argmax(kernel[:trained])) if target is None else int(target)
    qk_values, overlap = qk_svd(host, reading, target)
    amplitudes, phases, frequencies, constant = parts
    return Carrier(
        provenance=provenance(
            "carrier_of", host, reading, tokens, seed=seed, length=length, grid=len(grid)
        ),
        offsets=np.arange(length),
        kernel=kernel,
        measured=measured,
        amplitudes=amplitudes,
        phases=phases,
        frequencies=frequencies,
        constant=constant,
        target=target,
        train_length=trained,
        singular_values=np.linalg.svd(grid, compute_uv=False),
        qk_singular_values=qk_values,
        qk_overlap=overlap,
    )


# --- the arithmetic, on arrays ------------------------------------------------------------------

Parts = tuple[
    Float[np.ndarray, " pair"], Float[np.ndarray, " pair"], Float[np.ndarray, " pair"], float
]


def amplitudes_of(
    q: Float[np.ndarray, " d_head"],
    k: Float[np.ndarray, " d_head"],
    rotation: Rotation,
    scale: float,
) -> Parts:
    """Amplitudes A_m, phases φ_m, frequencies ω_m and constant A_0 of the carrier of q and k.

    >>> turn = Rotation.of(np.array([0.5]), adjacent=True)
    >>> one = np.array([1.0, 0.0, 2.0])
    >>> a, p, w, c = amplitudes_of(one, one, turn, scale=1.0)
    >>> float(a[0]), float(p[0]), float(w[0]), c
    (1.0, 0.0, 0.5, 4.0)

    Args:
        q: mean unrotated query.
        k: mean unrotated key.
        rotation: the layer's.
        scale: what q·k is multiplied by.
    """
    product = np.conj(rotation.complex_pairs(q)) * rotation.complex_pairs(k)
    product = scale * rotation.magnitude**2 * product
    still = rotation.unrotated_dims(len(q))
    # s = Re c exp(iω(j − i)) = |c| cos(ωΔ − arg c)
    return (
        np.abs(product),
        -np.angle(product) + 0.0,
        rotation.frequencies,
        float(scale * q[still] @ k[still]),
    )


def closed_form(reading: LayerReading) -> Parts:
    """Amplitudes, phases, frequencies and constant from the mean unrotated q and k of one head.

    Raises:
        ValueError: the layer does not rotate, so there is no closed form.
    """
    if reading.rotation is None or reading.q is None or reading.k is None:
        raise ValueError(
            f"layer {reading.layer} does not rotate its queries and keys, so its carrier has no "
            "closed form; use the measured one, up to the length of the tokens"
        )
    q, k = (x[:, :, 0].mean(dim=(0, 1)).cpu().numpy() for x in (reading.q, reading.k))
    return amplitudes_of(q, k, reading.rotation, reading.scale)


def evaluate(
    amplitudes: Float[np.ndarray, " pair"],
    phases: Float[np.ndarray, " pair"],
    frequencies: Float[np.ndarray, " pair"],
    constant: float,
    length: int,
) -> Float[np.ndarray, " offset"]:
    """g(Δ) at the offsets 0 .. length − 1.

    One matrix product: with Δ = aB + b, exp(iωΔ) = exp(iωaB) exp(iωb), so √length cosines a pair
    are computed instead of length.

    >>> evaluate(np.array([2.0]), np.array([0.0]), np.array([np.pi]), 1.0, 3).round(6).tolist()
    [3.0, -1.0, 3.0]
    """
    block = max(1, math.isqrt(length))
    starts = np.arange(0, length, block)
    coarse = (amplitudes * np.exp(1j * phases)) * np.exp(1j * np.outer(starts, frequencies))
    fine = np.exp(1j * np.outer(np.arange(block), frequencies))
    waves = coarse.real @ fine.real.T - coarse.imag @ fine.imag.T
    return waves.reshape(-1)[:length] + constant


def diagonal_means(
    kernel: Float[np.ndarray, "query key"], visible: Bool[np.ndarray, "query key"]
) -> Float[np.ndarray, " offset"]:
    """Mean of each diagonal Δ = i − j ≥ 0 over the visible pairs; NaN where there are none."""
    n = len(kernel)
    offset = np.subtract.outer(np.arange(n), np.arange(n))
    seen = visible & (offset >= 0)
    total = np.bincount(offset[seen], weights=kernel[seen], minlength=n)
    count = np.bincount(offset[seen], minlength=n)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _toeplitz(
    amplitudes: Float[np.ndarray, " pair"],
    phases: Float[np.ndarray, " pair"],
    frequencies: Float[np.ndarray, " pair"],
    constant: float,
    size: int,
) -> Float[np.ndarray, "size size"]:
    """G[i, j] = g(i − j) on the whole grid, negative offsets too; rank ≤ 2 · pairs + 1."""
    ahead = evaluate(amplitudes, phases, frequencies, constant, size)
    behind = evaluate(amplitudes, -phases, frequencies, constant, size)
    both = np.concatenate([behind[:0:-1], ahead])  # offsets −size+1 .. size−1
    return both[np.subtract.outer(np.arange(size), np.arange(size)) + size - 1]


def _observed_block(kernel: Float[np.ndarray, " offset"]) -> Float[np.ndarray, "query key"]:
    """G on the later half of the queries and the earlier half of the keys.

    A measured carrier knows no negative offset; this is the largest square block whose offsets,
    1 .. length − 1, were all seen.
    """
    half = len(kernel) // 2
    index = np.arange(half)
    return kernel[np.subtract.outer(index + half, index)]


def qk_svd(
    host: Host, reading: LayerReading, target: int
) -> tuple[Float[np.ndarray, " direction"] | None, Float[np.ndarray, " side"] | None]:
    """Singular values of W_Q R_target W_Kᵀ, and its top pair's overlap with the mean residual.

    Biases are folded in through the direction u of the mean attention input x̄:
    ``W + u bᵀ / |x̄|`` maps x̄ to ``W x̄ + b``. A head without rotation has R = 1. (None, None) where
    q is not affine in the input, as under a QK-norm.
    """
    weights = host.projection(reading.layer, reading.heads[0])
    w_q, w_k, b_q, b_k = (
        t.detach().double().cpu().numpy()
        for t in (weights.w_q, weights.w_k, weights.b_q, weights.b_k)
    )
    inputs = rearrange(reading.inputs.double(), "batch pos d_model -> (batch pos) d_model")
    x = inputs.cpu().numpy()
    if reading.q is None:
        return None, None
    q = rearrange(reading.q[:, :, 0], "batch pos d -> (batch pos) d").cpu().numpy()
    rounding = 1e-3 if reading.logits.element_size() >= 4 else 1e-1
    if np.abs(x @ w_q + b_q - q).max() > rounding * (1 + np.abs(q).max()):
        return None, None
    mean = x.mean(axis=0)
    size = np.linalg.norm(mean)
    direction = mean / size if size > 0 else mean
    fold = direction / size if size > 0 else mean
    left, right = w_q + np.outer(fold, b_q), w_k + np.outer(fold, b_k)
    q_left, r_left = np.linalg.qr(left @ _turn(reading.rotation, len(b_q), -target))
    q_right, r_right = np.linalg.qr(right)
    u, values, v = np.linalg.svd(r_left @ r_right.T)
    overlap = np.abs([direction @ q_left @ u[:, 0], direction @ q_right @ v[0]])
    return values * reading.scale, overlap


def _turn(rotation: Rotation | None, d_head: int, positions: int) -> Float[np.ndarray, "d d"]:
    """The matrix R with R x the vector x turned by so many positions, acting from the right."""
    matrix = np.eye(d_head)
    if rotation is None:
        return matrix
    angle = rotation.frequencies * positions
    first, second = (np.arange(d_head)[part] for part in (rotation.real, rotation.imag))
    matrix[first, first] = matrix[second, second] = np.cos(angle) * rotation.magnitude**2
    # q R k = Re conj(q) k exp(iω·positions) for pairs: (q1 k1 + q2 k2) cos − (q1 k2 − q2 k1) sin
    matrix[first, second] = -np.sin(angle) * rotation.magnitude**2
    matrix[second, first] = np.sin(angle) * rotation.magnitude**2
    return matrix


# --- what a call is given -----------------------------------------------------------------------


def _check_length(
    host: Host, reading: LayerReading, length: int | None, n: int, trained: int, *, rotates: bool
) -> int:
    if length is None:
        return max(_LENGTH, 8 * trained, n) if rotates else n
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"length={length!r} is a {type(length).__name__}; pass a number of offsets")
    if length < 2:
        raise ValueError(f"length={length} leaves nothing to compare; take 2 or more offsets")
    if not rotates and length > n:
        raise ValueError(
            f"length={length} asks for the closed form beyond the {n} tokens read, but layer "
            f"{reading.layer} of {host.description} has no rotation and so no closed form; take "
            f"length ≤ {n}, or longer tokens"
        )
    return int(length)


def _check_target(target: int | None, length: int) -> None:
    if target is None:
        return
    if isinstance(target, bool) or not isinstance(target, int | np.integer):
        raise TypeError(f"target={target!r} is a {type(target).__name__}; pass an offset in tokens")
    if not 0 <= target < length:
        raise ValueError(
            f"target={target} is not an offset of the carrier; take one in 0..{length - 1}, or a "
            "larger length"
        )
