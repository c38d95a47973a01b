"""What an encoding is, and what its features depend on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lenprobe.encodings.features import FeatureMap


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What the features of an encoding may depend on; the defaults are those of ``build``."""

    train_length: int
    """L. Rows of a learned table from L on are as initialised."""
    n_rows: int
    """Positions needed: the longest length asked for."""
    d_model: int = 32
    d_head: int = 32
    rotary_base: float = 10000.0
    rotary_dim: int | None = None
    n_heads: int = 1
    head: int = 0
    """Which head's ALiBi slope."""
    draws: int = 8
    """Random tables that a learned encoding is averaged over."""
    scale: float | None = None
    """Standard deviation of a learned table's entries; 0.8/√d_model by default, as in ``build``."""
    untrained_scale: float = 1.0
    """Multiplies the rows from L on."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("train_length", "n_rows", "d_model", "d_head", "n_heads", "draws")
        faults = [f"{n}={getattr(self, n)}: 1 or more" for n in positive if getattr(self, n) < 1]
        if not self.rotary_base > 1:
            faults.append(f"rotary_base={self.rotary_base}: above 1")
        if self.turning % 2 or not 0 < self.turning <= self.d_head:
            faults.append(f"rotary_dim={self.turning}: even, in 2..d_head={self.d_head}")
        if not 0 <= self.head < self.n_heads:
            faults.append(f"head={self.head}: in 0..{self.n_heads - 1}")
        if not (self.scale is None or self.scale > 0):
            faults.append(f"scale={self.scale}: above 0")
        if not self.untrained_scale >= 0:
            faults.append(f"untrained_scale={self.untrained_scale}: 0 or more")
        if faults:
            raise ValueError("no features under these settings; take " + "; ".join(faults))

    @property
    def turning(self) -> int:
        """How many of a head's dimensions turn."""
        return self.d_head - self.d_head % 2 if self.rotary_dim is None else self.rotary_dim


class Encoding(ABC):
    """One position encoding: its configuration, its features, how its positions shift."""

    name: str
    on_bridge = False
    """Whether TransformerLens 4.x, which has only bridges, can build it natively."""
    trains_with_offset = False
    """Whether training starts each sequence at a random position."""

    @abstractmethod
    def configure(self, **sizes: Any) -> dict[str, Any]:
        """Fields of the host's configuration: the kind of positions and what belongs to it."""

    @abstractmethod
    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """φ for α_L: one feature map, or one a random table."""

    def install(self, model: Any) -> None:  # noqa: B027  (most add nothing)
        """Adds to a built model what the host lacks; nothing for most encodings."""

    def position_rows(
        self, model: Any, start: int, length: int
    ) -> Float[Tensor, "pos d_model"] | None:
        """What is added to the embeddings at positions start .. start + length − 1.

        None where the host's own table is all there is, or where nothing is added.
        """
        return None
