"""Every probe of one head, from one reading as far as they can share it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lenprobe.models import spec_of
from lenprobe.nulls import HeadReading, read_with_null
from lenprobe.probes.alpha import alpha_of
from lenprobe.probes.carrier import carrier_from
from lenprobe.probes.decomposition import decomposition_from
from lenprobe.probes.dilution import dilution_of
from lenprobe.probes.equivariance import equivariance_of
from lenprobe.probes.pinning import pinning_of
from lenprobe.probes.routing import routing_from
from lenprobe.probes.rule import rule_from
from lenprobe.results import Result, versions
from lenprobe.typing import Json

_TIMES = (1, 2, 4)  # lengths at which dilution is measured, over the tokens' length


@dataclass(frozen=True, kw_only=True, eq=False)
class Portrait:
    """One head, asked everything."""

    model: str
    layer: int
    head: int
    results: Mapping[str, Result]
    """By the probe's name, in the order asked."""
    left_out: Mapping[str, str]
    """Probes that cannot be asked of this head, and why."""

    def as_dict(self) -> Json:
        """Plain values, one entry a probe."""
        return {
            "model": self.model,
            "layer": self.layer,
            "head": self.head,
            **{name: result.as_dict() for name, result in self.results.items()},
            "left_out": dict(self.left_out),
            "versions": versions(),
        }

    def summary(self) -> str:
        """What each probe says."""
        said = [
            f"{name}\n  " + result.summary().replace("\n", "\n  ")
            for name, result in self.results.items()
        ]
        missing = [f"{name}\n  not asked: {why}" for name, why in self.left_out.items()]
        return "\n".join([f"{self.model}, layer {self.layer} head {self.head}", *said, *missing])


def portrait_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    train_length: int | None = None,
    seed: int = 0,
) -> Portrait:
    """Rule, carrier, shares, routing, equivariance, dilution, pinning and α_L of one head.

    >>> from lenprobe.planted import carrier
    >>> found = portrait_of(carrier(3).model, layer=0, head=0)
    >>> found.results["rule"].number, found.results["carrier"].peak
    (3, 3)

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: contents, int64 [batch, pos]; uniform random ones by default.
        train_length: positions from here on are new; what the model says by default. Pinning and
            α_L are asked only where it is known.
        seed: of tokens, draws, intervals and the random head.

    Raises:
        ValueError, TypeError: bad layer, head or tokens.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    both = read_with_null(model, layer, head, tokens, seed=seed, at_least=4)
    host, reading = both.host, both.trained
    where = (model, reading.layer, reading.heads[0])
    results: dict[str, Result] = {
        "rule": rule_from(both),
        "carrier": carrier_from(host, reading, both.tokens, seed=seed),
        "decomposition": decomposition_from(both),
        "routing": routing_from(both),
        "equivariance": equivariance_of(*where, seed=seed),
        "dilution": dilution_of(
            *where, both.tokens, lengths=_lengths(both), sequences=_sequences(both), seed=seed
        ),
    }
    left_out = {}
    spec = spec_of(model)
    known = train_length or (None if spec is None else spec.train_length)
    if known is None:
        left_out = dict.fromkeys(("pinning", "alpha"), "the training length is not known; give it")
    elif 2 * known > host.n_ctx:
        reason = f"n_ctx={host.n_ctx} leaves too few positions beyond train_length={known}"
        left_out = dict.fromkeys(("pinning", "alpha"), reason)
    else:
        results["pinning"] = pinning_of(*where, train_length=known, seed=seed)
        results["alpha"] = alpha_of(*where, train_length=known, seed=seed)
    return Portrait(
        model=host.description,
        layer=reading.layer,
        head=reading.heads[0],
        results=results,
        left_out=left_out,
    )


def _sequences(both: HeadReading) -> int:
    """As many as were read at the tokens' length, and no more than dilution takes by itself."""
    return min(2048, max(8, both.tokens.shape[0]))


def _lengths(both: HeadReading) -> list[int]:
    """As far as the head's logits are known and the model can be measured."""
    own = both.tokens.shape[1]
    reach = both.host.n_ctx if both.trained.rotation is not None else own
    return [times * own for times in _TIMES if times * own <= reach]
