"""What a head's logits are made of: relative position, absolute position, content.

The positional kernel P(i, j) is the mean of the logits s(i, j) over contents. It is split by
least squares over the visible pairs,

    P(i, j) ≈ row(i) + r(i − j) + c(j),      Σ r = 0,  Σ c = 0,  c without a linear trend.

A constant added to a row changes no softmax, so variances are those of the row-centred logits
s̃(i, j) = s(i, j) − mean over j' of s(i, j'). For the same reason a linear trend in the offset and
one in the key are one and the same (ALiBi and an absolute ramp cannot be told apart): it is given
to the relative part. With ⟨a, b⟩ the sum over visible pairs, the shares of E⟨s̃, s̃⟩ are

    relative ⟨r̃, P⟩,  absolute ⟨c̃, P⟩,  other positional ⟨P, P⟩ − both,  content the rest,

each an unbiased estimate: products of two different sequences only, so that no content variance
leaks into the positional part. All of it follows from sums over diagonals and columns and from
the sequences' products with each other, which are all that is kept. Definition: ours.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lenprobe.nulls import HeadReading, read_with_null
from lenprobe.reading import LayerReading, provenance
from lenprobe.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PARTS = ("relative", "absolute", "other positional", "content")
"""The order of the shares."""

FOUND = 0.5
"""A head is positional where the whole interval of its positional share lies above this."""
SPREAD = 0.5
"""Standard deviation of row-centred logits from which on a head can be said to choose, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition(Result):
    """The parts of one head's logits, with the share of each in their row-centred variance."""

    kernel: Float[np.ndarray, "query key"]
    """Row-centred P(i, j), in logits; NaN where masked."""
    standard_error: Float[np.ndarray, "query key"]
    """Of ``kernel``; NaN where masked or where there is one sequence."""
    row: Float[np.ndarray, " query"]
    """row(i), which no softmax sees."""
    offsets: Int[np.ndarray, " offset"]
    """The offsets Δ = i − j that were visible."""
    relative: Float[np.ndarray, " offset"]
    """r(Δ)."""
    absolute: Float[np.ndarray, " key"]
    """c(j)."""
    shares: Float[np.ndarray, " part"]
    """Relative, absolute, other positional, content; their sum is 1, or 0 for constant logits."""
    intervals: Float[np.ndarray, "part bound"]
    """Bootstrap interval over sequences of each share."""
    positional_interval: Float[np.ndarray, " bound"]
    """The same of the positional share."""
    variance: float
    """Mean square of the row-centred logits."""
    trend_share: float
    """Share of the variance of r that is a linear trend in Δ."""
    null_shares: Float[np.ndarray, " part"]
    """The shares of the same head at random initialisation."""

    @property
    def relative_share(self) -> float:
        """Share of the relative part r(i − j)."""
        return float(self.shares[0])

    @property
    def absolute_share(self) -> float:
        """Share of the absolute part c(j)."""
        return float(self.shares[1])

    @property
    def positional_share(self) -> float:
        """Share of everything that the positions alone decide."""
        return float(self.shares[:3].sum())

    @property
    def content_share(self) -> float:
        """Share of what the tokens decide."""
        return float(self.shares[3])

    @property
    def found(self) -> bool:
        """Whether positions decide more than half of the variance, and of logits that matter.

        Random heads with a position bias have positional logits too, of a spread that leaves
        attention all but uniform.
        """
        matters = np.sqrt(self.variance) >= SPREAD
        return bool(matters and self.positional_interval[0] > FOUND)

    @property
    def note(self) -> str:
        """What cannot be told from logits, where it matters here."""
        if self.trend_share * self.relative_share > 0.25:
            return "the relative part is mostly linear: softmax cannot tell it from a ramp in j"
        return ""

    def summary(self) -> str:
        """The shares with their intervals, and the null's."""
        named = [
            f"{name} {share:.2f} [{low:.2f}, {high:.2f}]"
            for name, share, (low, high) in zip(PARTS, self.shares, self.intervals, strict=True)
        ]
        null = ", ".join(
            f"{name} {share:.2f}" for name, share in zip(PARTS, self.null_shares, strict=True)
        )
        lines = [
            "shares: " + ", ".join(named),
            f"logit spread {np.sqrt(self.variance):.3g} nats; at random initialisation: {null}",
            self.note,
        ]
        return "\n".join(line for line in lines if line)

    def to_frame(self) -> "pd.DataFrame":
        """One row a part: share, interval, share at random initialisation."""
        import pandas as pd

        return pd.DataFrame(
            {
                "part": PARTS,
                "share": self.shares,
                "low": self.intervals[:, 0],
                "high": self.intervals[:, 1],
                "null": self.null_shares,
            }
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The relative part r(Δ) and the absolute part c(j) on one axis."""
        from lenprobe.plots import BLUE, RED, _axes

        ax = _axes(ax)
        ax.plot(self.offsets, self.relative, color=BLUE, label="relative r(Δ), Δ = i − j")
        ax.plot(self.absolute, "--", color=RED, label="absolute c(j)")
        ax.set(xlabel="offset Δ or key position j (tokens)", ylabel="part of the mean logit (nats)")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8)
        return ax


def decompose(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Decomposition:
    """The relative, absolute and content parts of one head's logits, and their shares.

    >>> from lenprobe.planted import carrier
    >>> found = decompose(carrier(3).model, layer=0, head=0)
    >>> round(found.relative_share, 2), abs(round(found.content_share, 2))
    (1.0, 0.0)

    Args:
        model: a HookedTransformer or TransformerBridge.
        layer: 0-based.
        head: 0-based.
        tokens: contents to average over, int64 [batch, pos]; uniform random ones by default.
        confidence: of the bootstrap intervals over sequences, in (0, 1).
        resamples: of the bootstrap.
        seed: of the default tokens, the bootstrap and the random weights of the null.

    Raises:
        ValueError: bad layer, head or tokens; too few sequences for the interval asked.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    both = read_with_null(model, layer, head, tokens, seed=seed, at_least=3)
    return decomposition_from(both, confidence=confidence, resamples=resamples)


def decomposition_from(
    both: HeadReading, *, confidence: float = 0.95, resamples: int = 1000
) -> Decomposition:
    """:func:`decompose` on a head that has been read already."""
    check_sequences(both.tokens.shape[0], confidence)
    visible = both.trained.visible.cpu().numpy()
    design = Design.of(visible)
    moments = design.moments(logits_of(both.trained))
    null = design.moments(logits_of(both.random))
    weights = bootstrap_weights(moments.batch, resamples, both.seed)
    drawn = moments.shares(weights)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    relative, absolute = design.solve(moments.sums.mean(axis=0))
    spread = relative - relative.mean()
    return Decomposition(
        provenance=provenance(
            "decompose",
            both.host,
            both.trained,
            both.tokens,
            seed=both.seed,
            confidence=confidence,
            resamples=resamples,
        ),
        kernel=design.square(moments.mean),
        standard_error=design.square(moments.standard_error),
        row=design.row_part(moments.row_means, relative, absolute),
        offsets=design.offsets,
        relative=relative,
        absolute=absolute,
        shares=moments.shares()[0],
        intervals=np.quantile(drawn, tails, axis=0).T,
        positional_interval=np.quantile(drawn[:, :3].sum(axis=1), tails),
        variance=float(moments.total.mean() / design.pairs),
        trend_share=_trend_share(design.offsets, spread),
        null_shares=null.shares()[0],
    )


# --- the arithmetic, on arrays ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """All that the shares need of a batch of logits; sums are over visible pairs."""

    mean: Float[np.ndarray, " pair"]
    """Row-centred P."""
    standard_error: Float[np.ndarray, " pair"]
    row_means: Float[np.ndarray, " query"]
    """What centring took from P."""
    sums: Float[np.ndarray, "batch column"]
    """⟨s̃_b, each diagonal⟩, then ⟨s̃_b, each key⟩."""
    products: Float[np.ndarray, "form batch batch"]
    """⟨r̃_b, s̃_b'⟩, ⟨c̃_b, s̃_b'⟩ and ⟨s̃_b, s̃_b'⟩ of every two sequences."""

    @property
    def batch(self) -> int:
        return len(self.sums)

    @property
    def total(self) -> Float[np.ndarray, " batch"]:
        """⟨s̃_b, s̃_b⟩."""
        return np.diagonal(self.products[2])

    def shares(
        self, weights: Float[np.ndarray, "draw batch"] | None = None
    ) -> Float[np.ndarray, "draw part"]:
        """The four shares; one row for each row of weights over sequences (equal by default)."""
        if weights is None:
            weights = np.full((1, self.batch), 1 / self.batch)
        own = (weights**2).sum(axis=1)
        total = weights @ self.total
        same = weights**2 @ np.diagonal(self.products, axis1=1, axis2=2).T
        across = np.einsum("db,fbc,dc->df", weights, self.products, weights, optimize=True) - same
        with np.errstate(divide="ignore", invalid="ignore"):
            # one sequence says nothing of content: then all of it counts as positional
            forms = np.where(own[:, None] < 1 - 1e-12, across / (1 - own[:, None]), same)
            relative, absolute, positional = forms.T
            parts = [relative, absolute, positional - relative - absolute, total - positional]
            return np.where(total > 0, np.array(parts) / total, 0.0).T


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """The least-squares problem of one mask: which pairs are visible, and how to solve for r, c."""

    query: Int[np.ndarray, " pair"]
    key: Int[np.ndarray, " pair"]
    starts: Int[np.ndarray, " query"]
    """Where each query's pairs begin."""
    counts: Int[np.ndarray, " query"]
    offsets: Int[np.ndarray, " offset"]
    columns: Any
    """Sparse [pair, offset + key]: which diagonal and which key a pair belongs to."""
    factor: Float[Tensor, "column column"]
    """Cholesky's, of the normal equations with the three constraints added."""
    length: int

    @classmethod
    def of(cls, visible: Bool[np.ndarray, "query key"]) -> "Design":
        """The problem for a mask; every query must see a key."""
        from scipy import sparse

        n = len(visible)
        query, key = np.nonzero(visible)
        counts = np.bincount(query, minlength=n)
        offsets, diagonal = np.unique(query - key, return_inverse=True)
        pair = np.arange(len(query))
        ones, width = np.ones(len(query)), len(offsets) + n
        columns = sparse.csr_array((ones, (pair, diagonal)), shape=(len(query), width))
        columns += sparse.csr_array((ones, (pair, len(offsets) + key)), shape=(len(query), width))
        rows = (sparse.csr_array((ones, (query, pair)), shape=(n, len(query))) @ columns).toarray()
        normal = (columns.T @ columns).toarray() - rows.T @ (rows / counts[:, None])
        bound = constraints(len(offsets), n)
        # θ with bound·θ = 0 is unchanged by the added term, which makes the matrix invertible
        whole = normal + normal.diagonal().mean() * bound.T @ bound
        return cls(
            query=query,
            key=key,
            starts=np.concatenate([[0], np.cumsum(counts)[:-1]]),
            counts=counts,
            offsets=offsets,
            columns=columns,
            factor=torch.linalg.cholesky(torch.from_numpy(whole)),
            length=n,
        )

    @property
    def pairs(self) -> int:
        return len(self.query)

    def solve(
        self, sums: Float[np.ndarray, "*batch column"]
    ) -> tuple[Float[np.ndarray, "*batch offset"], Float[np.ndarray, "*batch key"]]:
        """R and c of kernels with these sums over diagonals and keys.

        By torch and not by scipy, whose threads would keep the cores busy for a while in the middle
        of a model's forward pass.
        """
        right = torch.from_numpy(sums.reshape(-1, sums.shape[-1])).mT
        solution = torch.cholesky_solve(right, self.factor).mT.numpy().reshape(sums.shape)
        return solution[..., : len(self.offsets)], solution[..., len(self.offsets) :]

    def moments(self, logits: Float[np.ndarray, "batch query key"]) -> Moments:
        """The sufficient statistics of a batch of logits."""
        seen = logits[:, self.query, self.key]
        row_means = np.add.reduceat(seen, self.starts, axis=1) / self.counts
        seen -= np.repeat(row_means, self.counts, axis=1)
        mean, batch = seen.mean(axis=0), len(seen)
        spread = np.einsum("bp,bp->p", seen, seen) - batch * mean**2
        sums = seen @ self.columns
        relative, absolute = self.solve(sums)
        split = len(self.offsets)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.sqrt(np.maximum(spread, 0) / (batch * np.float64(batch - 1)))
        return Moments(
            mean=mean,
            standard_error=error,
            row_means=row_means.mean(axis=0),
            sums=sums,
            products=np.stack(
                [relative @ sums[:, :split].T, absolute @ sums[:, split:].T, seen @ seen.T]
            ),
        )

    def square(self, values: Float[np.ndarray, " pair"]) -> Float[np.ndarray, "query key"]:
        """The values of the pairs as a matrix, NaN where masked."""
        out = np.full((self.length, self.length), np.nan)
        out[self.query, self.key] = values
        return out

    def row_part(
        self,
        row_means: Float[np.ndarray, " query"],
        relative: Float[np.ndarray, " offset"],
        absolute: Float[np.ndarray, " key"],
    ) -> Float[np.ndarray, " query"]:
        """row(i): what r and c leave of each row's mean."""
        fitted = self.columns @ np.concatenate([relative, absolute])
        return row_means - np.add.reduceat(fitted, self.starts) / self.counts


def constraints(offsets: int, keys: int) -> Float[np.ndarray, "constraint column"]:
    """Unit rows that r and c are orthogonal to: 1 over r, 1 over c, the linear trend over c.

    >>> constraints(3, 3).shape
    (3, 6)
    """
    rows = np.zeros((3, offsets + keys))
    rows[0, :offsets] = 1
    rows[1, offsets:] = 1
    rows[2, offsets:] = np.arange(keys) - (keys - 1) / 2
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def relative_part(
    mean: Float[np.ndarray, "query key"], visible: Bool[np.ndarray, "query key"]
) -> Float[np.ndarray, " offset"]:
    """r(Δ) of a positional kernel at Δ = 0 .. n − 1, NaN where no pair is visible.

    >>> n = 6
    >>> offset = np.subtract.outer(np.arange(n), np.arange(n))
    >>> r = relative_part(np.where(offset == 2, 6.0, 0.0), offset >= 0)
    >>> r.round(9).tolist()
    [-1.0, -1.0, 5.0, -1.0, -1.0, -1.0]

    Args:
        mean: P(i, j), in logits.
        visible: which pairs count.
    """
    design = Design.of(visible)
    relative, _ = design.solve(design.moments(mean[None]).sums[0])
    out = np.full(len(mean), np.nan)
    behind = design.offsets >= 0
    out[design.offsets[behind]] = relative[behind]
    return out


def bootstrap_weights(batch: int, resamples: int, seed: int) -> Float[np.ndarray, "draw batch"]:
    """The weight of each sequence in each resample of the batch.

    >>> bootstrap_weights(4, 2, seed=0).sum(axis=1).tolist()
    [1.0, 1.0]
    """
    generator = np.random.default_rng(seed)
    return generator.multinomial(batch, np.full(batch, 1 / batch), size=resamples) / batch


def check_sequences(batch: int, confidence: float) -> None:
    """Raises where no interval of the level can come from so few sequences.

    The range of B independent draws holds their median with probability 1 − 2^(1−B): fewer
    sequences than that needs support no interval of the level, whatever the distribution.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is not a level; take one in (0, 1), as 0.95")
    needed = int(np.ceil(1 - np.log2(1 - confidence)))
    if batch < needed:
        raise ValueError(
            f"tokens has {batch} sequences, too few for a {100 * confidence:g} % interval; pass "
            f"{needed} or more (64 are better), or a lower confidence"
        )


def logits_of(reading: LayerReading) -> Float[np.ndarray, "batch query key"]:
    """The logits of the one head read, as an array."""
    logits: Float[np.ndarray, "batch query key"] = reading.logits[:, 0].double().cpu().numpy()
    return logits


def _trend_share(
    offsets: Int[np.ndarray, " offset"], spread: Float[np.ndarray, " offset"]
) -> float:
    """How much of the variance of r a straight line explains."""
    line = offsets - offsets.mean()
    energy = (line @ line) * (spread @ spread)
    return float((line @ spread) ** 2 / energy) if energy > 0 else 0.0
