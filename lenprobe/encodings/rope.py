"""RoPE: queries and keys turn by an angle that grows with the position (Su et al. 2021)."""

from typing import Any

import numpy as np

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import FeatureMap, OffsetFeatures


class Rope(Encoding):
    """Adjacent pairs: this layout alone reads the same on every host and every version."""

    name = "rope"
    on_bridge = True

    def configure(self, **sizes: Any) -> dict[str, Any]:
        """All dimensions of a head turn by default."""
        turning = sizes["rotary_dim"]
        return {
            "positional_embedding_type": "rotary",
            "rotary_dim": sizes["d_head"] if turning is None else turning,
            "rotary_base": sizes["rotary_base"],
            "rotary_adjacent_pairs": True,
        }

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """cos(ω_m Δ) and sin(ω_m Δ) of each pair."""
        omega = settings.rotary_base ** (-np.arange(0, settings.turning, 2) / settings.turning)

        def waves(offset: np.ndarray) -> np.ndarray:
            angles = np.multiply.outer(offset, omega)
            return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

        return [OffsetFeatures(name=self.name, function=waves)]


ROPE = Rope()
