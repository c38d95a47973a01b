"""No positions: only the causal mask tells one key from another (NoPE)."""

from typing import Any

import numpy as np

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import FeatureMap, OffsetFeatures


class NoPositions(Encoding):
    """The host has no such kind; a rotation of no dimensions is one."""

    name = "none"

    def configure(self, **_: Any) -> dict[str, Any]:
        """A rotation of no dimensions."""
        return {"positional_embedding_type": "rotary", "rotary_dim": 0}

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """None at all: the kernel is 0."""
        return [OffsetFeatures(name=self.name, function=lambda offset: np.zeros((len(offset), 0)))]


NONE = NoPositions()
