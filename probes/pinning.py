"""Is a head pinned to an absolute slot once its queries stand beyond the trained positions.

For queries ``i ≥ L``: the distribution of the absolute argmax key. Its mode is the **slot**, the
mode's share the **strength**. A head of a relative rule moves its argmax with the query, a pinned
one does not. The same figure for uniform choice is ``mean_i 1/(i + 1)`` at the first slots, the
most that any slot gets by chance.

An argmax exists where attention is all but uniform too, and a random head's may well favour one
slot (56 % of random sinusoidal heads pass five times uniform). So a slot counts as found only where
the head also puts weight on it: on average at least twice what uniform attention would. (One-head
models: random heads reach 1.6, learned absolute ones trained on offsets 1, 3 and 8 have 2.8 to 8.)

Learned absolute positions pin, since the rows from L on are as initialised (arXiv 2607.18759). In
the arm where every row is trained (random position offset in training) they generalise instead
(Huang et al. 2024), so the probe is to be run beside it. Definition: ours.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.hosts import host_of
from lenprobe.nulls import reinitialised
from lenprobe.reading import (
    check_head,
    check_layer,
    check_tokens,
    known_train_length,
    provenance,
    random_tokens,
    read,
)
from lenprobe.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

TIMES_UNIFORM = 5.0
"""A slot counts as found from this many times the uniform figure on, ..."""
TIMES_WEIGHT = 2.0
"""... and this many times uniform attention's weight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pinning(Result):
    """Where the argmax of the queries beyond the trained positions falls."""

    train_length: int
    """L."""
    length: int
    """Tokens a sequence: queries L .. length − 1 are counted."""
    argmax_shares: Float[np.ndarray, " key"]
    """Share of those queries whose largest weight is on each absolute key."""
    uniform: float
    """Share of the likeliest slot when keys are chosen uniformly; its weight too."""
    slot_weight: float
    """Mean attention weight on the slot."""
    moving: float
    """Share of the likeliest offset Δ: what a relative rule would have."""
    null_strength: float
    """Strength of the same head at random initialisation."""

    @property
    def slot(self) -> int:
        """The absolute key chosen most often."""
        return int(self.argmax_shares.argmax())

    @property
    def strength(self) -> float:
        """Its share."""
        return float(self.argmax_shares.max())

    @property
    def inside(self) -> bool:
        """Whether the slot lies inside the training range."""
        return self.slot < self.train_length

    @property
    def found(self) -> bool:
        """Pinned: strength and weight well above uniform, the slot inside, no offset as strong."""
        strong = self.strength >= TIMES_UNIFORM * self.uniform
        heavy = self.slot_weight >= TIMES_WEIGHT * self.uniform
        return bool(strong and heavy and self.inside and self.strength > self.moving)

    def summary(self) -> str:
        """Whether it is pinned, where, how strongly."""
        verdict = f"pinned to slot {self.slot}" if self.found else "not pinned"
        where = "inside" if self.inside else "outside"
        return (
            f"{verdict}: key {self.slot} ({where} the training range) has the largest weight of "
            f"{self.strength:.0%} of the queries from {self.train_length} on\n"
            f"mean weight there {self.slot_weight:.1%}, uniform {self.uniform:.1%}; random head "
            f"{self.null_strength:.0%}; "
            f"best single offset {self.moving:.0%}"
        )

    def to_frame(self) -> "pd.DataFrame":
        """One row a key."""
        import pandas as pd

        return pd.DataFrame({"key": np.arange(self.length), "share": self.argmax_shares})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The share of each key, with the training range and the uniform figure."""
        from lenprobe.plots import BLUE, GREY, _axes, _tidy

        ax = _axes(ax)
        ax.bar(np.arange(self.length), self.argmax_shares, width=1.0, color=BLUE)
        span = (-0.5, self.train_length - 0.5)
        ax.axvspan(*span, color=GREY, alpha=0.12, lw=0, label="training range")
        ax.axhline(self.uniform, color=GREY, ls=":", label="uniform choice")
        ax.set(xlabel="absolute key j", ylabel="share of argmax")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8)
        return _tidy(ax)


def pinning_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    train_length: int | None = None,
    seed: int = 0,
) -> Pinning:
    """Whether, and where, a head pins once queries stand beyond the trained positions.

    >>> from lenprobe.planted import carrier, pin
    >>> found = pinning_of(pin(5).model, 0, 0)
    >>> found.found, found.slot, found.strength
    (True, 5, 1.0)
    >>> pinning_of(carrier(3).model, 0, 0).found
    False

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: contents, int64 [batch, pos], longer than L; random ones of 3 L by default, or as
            far as the model reaches.
        train_length: L; what the model says by default.
        seed: of the default tokens and of the random head.

    Raises:
        ValueError, TypeError: bad layer, head or tokens; L unknown or not below the tokens' length.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    host = host_of(model)
    layer, head = check_layer(host, layer), check_head(host, head)
    trained = known_train_length(host, train_length)
    if tokens is None:
        tokens = random_tokens(host.d_vocab, 128, min(3 * trained, host.n_ctx), seed)
    tokens = check_tokens(host, tokens)
    length = tokens.shape[1]
    if not 1 <= trained < length:
        raise ValueError(
            f"train_length={trained} leaves no query beyond it in sequences of {length} tokens; "
            f"take one in 1..{length - 1}, or longer tokens (the model takes {host.n_ctx})"
        )
    reading = read(model, tokens, layer, [head])
    slots, offsets = argmax_shares(reading.pattern[:, 0], trained)
    with reinitialised(host, seed=seed, up_to_layer=layer):
        random = read(model, tokens, layer, [head])
    return Pinning(
        provenance=provenance("pinning_of", host, reading, tokens, seed=seed),
        train_length=trained,
        length=length,
        argmax_shares=slots,
        slot_weight=float(reading.pattern[:, 0, trained:, int(slots.argmax())].double().mean()),
        uniform=float(np.mean(1 / (np.arange(trained, length) + 1))),
        moving=float(offsets.max()),
        null_strength=float(argmax_shares(random.pattern[:, 0], trained)[0].max()),
    )


def argmax_shares(
    pattern: Float[Tensor, "batch query key"], first: int
) -> tuple[Float[np.ndarray, " key"], Float[np.ndarray, " offset"]]:
    """How often the largest weight of the queries from ``first`` on falls on each key and offset.

    >>> slots, offsets = argmax_shares(torch.eye(4)[None], first=2)
    >>> slots.tolist(), offsets.tolist()
    ([0.0, 0.0, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0])

    A query whose largest weight is on several keys counts for none: nothing was chosen.
    """
    rows = pattern[:, first:].double()
    top = torch.topk(rows, min(2, rows.shape[-1]), dim=-1)
    length = rows.shape[-1]
    clear = top.values[..., 0] > top.values[..., -1] * (1 + 1e-9)
    key = top.indices[..., 0]
    offset = torch.arange(first, length, device=key.device) - key
    counts = (
        torch.bincount(place[clear], minlength=length).double().cpu().numpy()
        for place in (key, offset)
    )
    slots, offsets = (count / clear.numel() for count in counts)
    return slots, offsets
