"""What a head does, in one object and one sentence.

On sequences of the training length, each query's largest weight is compared with every fixed offset
and every absolute slot; the rule is the one that most queries follow. Beside it stand the share of
the logits' variance that positions decide, and, for an offset of a head that rotates, how far the
rule will hold: the horizon, the first offset beyond the training range whose carrier reaches the
target's. Definition: ours.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.nulls import HeadReading, read_with_null
from lenprobe.probes.carrier import carrier_from
from lenprobe.probes.decomposition import Design, logits_of
from lenprobe.probes.pinning import TIMES_WEIGHT
from lenprobe.reading import LayerReading, provenance, train_length_of
from lenprobe.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAJORITY = 0.5
"""A rule counts as found where more than this share of the queries follow it."""
_POSITIONS = 4  # that must be able to follow a rule


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule(Result):
    """The offset or slot that most queries attend to, and how far that will hold."""

    kind: Literal["offset", "slot"]
    number: int
    """Which offset or slot."""
    share: float
    """Share of the queries whose largest weight is there."""
    weight: float
    """Mean attention weight there."""
    uniform: float
    """The same of a uniform head."""
    positional_share: float
    """Share of the logits' variance that positions decide."""
    train_length: int
    known_to: int
    """Offsets whose logits are known: any horizon below it would have been seen."""
    horizon: float
    """First offset at which a side lobe reaches the target; infinite for none, NaN for a slot."""
    offset_shares: Float[np.ndarray, " offset"]
    """Share of the queries whose largest weight is at each offset, of those that have it."""
    slot_shares: Float[np.ndarray, " key"]
    """The same of each absolute slot."""
    null_share: float
    """Share of the best rule of the same head at random initialisation."""

    @property
    def found(self) -> bool:
        """Whether most queries follow the rule, and put weight on it beyond uniform attention."""
        heavy = self.weight >= TIMES_WEIGHT * self.uniform
        return self.share > MAJORITY and heavy

    @property
    def sentence(self) -> str:
        """The finding as one sentence."""
        share = f"positional share {round(self.positional_share, 2) + 0.0:.2f}"
        if not self.found:
            by = "content" if self.positional_share < MAJORITY else "no single offset or slot"
            return f"attends by {by} (best rule: {self._named}); {share}"
        return f"attends to {self._named}; {share}; {self._reach}"

    @property
    def _named(self) -> str:
        return f"{self.kind} {self.number} ({self.share:.0%} of queries)"

    @property
    def _reach(self) -> str:
        if self.kind == "slot":
            return f"read up to length {self.known_to}"
        if math.isfinite(self.horizon):
            lobe = int(self.horizon)
            return f"holds to length {lobe}, then a side lobe at {lobe} wins"
        return f"no side lobe wins up to length {self.known_to}"

    def summary(self) -> str:
        """The sentence, and the random head's figure."""
        return f"{self.sentence}\nbest rule of the random head: {self.null_share:.0%} of queries"

    def to_frame(self) -> "pd.DataFrame":
        """One row an offset or slot."""
        import pandas as pd

        parts = {"offset": self.offset_shares, "slot": self.slot_shares}
        rows = [(kind, n, share) for kind, found in parts.items() for n, share in enumerate(found)]
        return pd.DataFrame(rows, columns=["kind", "number", "share"])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """How many queries follow each offset and each slot."""
        from lenprobe.plots import BLUE, RED, _axes, _tidy

        ax = _axes(ax)
        ax.plot(self.offset_shares, color=BLUE, marker="o", ms=3, label="offset Δ = i − j")
        ax.plot(self.slot_shares, "--", color=RED, marker="s", ms=3, label="absolute slot j")
        ax.set(xlabel="offset or slot (tokens)", ylabel="share of queries", ylim=(-0.03, 1.05))
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8)
        return _tidy(ax)


def rule_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    length: int | None = None,
    seed: int = 0,
) -> Rule:
    """The rule of one head.

    >>> from lenprobe.planted import side_lobe
    >>> print(rule_of(side_lobe(3, lobe=101).model, 0, 0).sentence)
    attends to offset 3 (100% of queries); positional share 1.00; holds to length 101, then a \
side lobe at 101 wins

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: contents, int64 [batch, pos]; uniform random ones of the training length by default.
        length: offsets that are searched for a horizon, for heads that rotate; 1,024 or more by
            default.
        seed: of the default tokens and of the random head.

    Raises:
        ValueError, TypeError: bad layer, head, tokens or length.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    both = read_with_null(model, layer, head, tokens, seed=seed, at_least=3)
    return rule_from(both, length=length)


def rule_from(both: HeadReading, *, length: int | None = None) -> Rule:
    """:func:`rule_of` on a head that has been read already."""
    reading = both.trained
    offsets, slots = follow_shares(_choices(reading))
    kind, number, share = _best(offsets, slots)
    trained = train_length_of(both.host, both.tokens)
    known, horizon = both.tokens.shape[1], math.nan
    if kind == "offset":
        rotates = reading.rotation is not None and reading.q is not None
        carrier = carrier_from(
            both.host, reading, both.tokens, target=number, length=length if rotates else None
        )
        known, horizon = int(carrier.offsets[-1]) + 1, carrier.horizon
    weight, uniform = _weight(reading, kind, number)
    design = Design.of(reading.visible.cpu().numpy())
    shares = design.moments(logits_of(reading)).shares()[0]
    return Rule(
        provenance=provenance("rule_of", both.host, reading, both.tokens, seed=both.seed),
        kind=kind,
        number=number,
        share=share,
        weight=weight,
        uniform=uniform,
        positional_share=float(shares[:3].sum()),
        train_length=trained,
        known_to=known,
        horizon=horizon,
        offset_shares=offsets,
        slot_shares=slots,
        null_share=_best(*follow_shares(_choices(both.random)))[2],
    )


# --- the arithmetic, on arrays ------------------------------------------------------------------


def follow_shares(
    choice: Int[np.ndarray, "batch query"],
) -> tuple[Float[np.ndarray, " offset"], Float[np.ndarray, " key"]]:
    """The share of queries that choose each offset, and each slot, of those that could.

    A query can follow offset d from i = d on and slot p from i = p on; query 0 has no choice. A
    rule that fewer than four positions can follow gets no share: any head would follow one by
    chance.

    >>> offsets, slots = follow_shares(np.array([[0, 0, 1, 2, 3]]))
    >>> offsets.tolist(), slots.tolist()
    ([0.0, 1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.0, 0.0, 0.0])

    Args:
        choice: key of the largest weight; −1 where several share it.
    """
    batch, length = choice.shape
    query = np.arange(1, length)
    chosen = choice[:, 1:]
    offset = np.where(chosen >= 0, query - chosen, -1)
    found = []
    for place in (offset, chosen):
        counts = np.bincount(place[place >= 0], minlength=length)[:length]
        positions = length - np.maximum(np.arange(length), 1)
        enough = positions >= min(_POSITIONS, length - 1)
        found.append(np.where(enough, counts / (batch * positions), 0.0))
    return found[0], found[1]


def _best(
    offsets: Float[np.ndarray, " offset"], slots: Float[np.ndarray, " key"]
) -> tuple[Literal["offset", "slot"], int, float]:
    """Offsets come first among equals."""
    if offsets.max() >= slots.max():
        return "offset", int(offsets.argmax()), float(offsets.max())
    return "slot", int(slots.argmax()), float(slots.max())


def _choices(reading: LayerReading) -> Int[np.ndarray, "batch query"]:
    import torch

    pattern = reading.pattern[:, 0].double()
    top = torch.topk(pattern, 2, dim=-1)
    clear = top.values[..., 0] > top.values[..., 1] * (1 + 1e-9)
    return torch.where(clear, top.indices[..., 0], -1).cpu().numpy()


def _weight(reading: LayerReading, kind: str, number: int) -> tuple[float, float]:
    """Mean weight of the queries that can follow a rule, and that of a uniform head."""
    pattern = reading.pattern[:, 0].double().cpu().numpy()
    query = np.arange(max(number, 1), pattern.shape[1])
    key = query - number if kind == "offset" else np.full_like(query, number)
    visible = reading.visible.sum(dim=-1).cpu().numpy()[query]
    return float(pattern[:, query, key].mean()), float((1 / visible).mean())
