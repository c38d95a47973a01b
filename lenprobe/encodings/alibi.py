"""ALiBi: a fixed penalty on the logits that grows with the distance (Press et al. 2022)."""

from typing import Any

import numpy as np

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import FeatureMap, OffsetFeatures


def slopes(n_heads: int) -> np.ndarray:
    """The slope m of each head as the host has it: 2^(−8h/n_heads) for h = 1 .. n_heads.

    >>> slopes(2).tolist()
    [0.0625, 0.00390625]
    """
    return 2.0 ** (-8 * np.arange(1, n_heads + 1) / n_heads)


class Alibi(Encoding):
    """The host's own bias −m Δ."""

    name = "alibi"

    def configure(self, **_: Any) -> dict[str, Any]:
        """The host's own kind."""
        return {"positional_embedding_type": "alibi"}

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """−m Δ, temperature θ ≥ 0: the slope is fixed and penalises distance."""
        slope = slopes(settings.n_heads)[settings.head]

        def penalty(offset: np.ndarray) -> np.ndarray:
            return -slope * offset[:, None].astype(np.float64)

        return [OffsetFeatures(name=self.name, function=penalty, nonnegative=True)]


ALIBI = Alibi()
