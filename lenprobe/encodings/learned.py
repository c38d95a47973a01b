"""Learned absolute positions: one trained vector a position, added to the embeddings.

``learned`` trains the rows below the training length alone; ``learned_offset`` starts each
training sequence at a random position, so that every row is trained.
"""

from typing import Any

import numpy as np

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import BilinearFeatures, FeatureMap, FreeRows


class Learned(Encoding):
    """A table of n_ctx rows, of which training meets the first."""

    name = "learned"
    on_bridge = True

    def configure(self, **_: Any) -> dict[str, Any]:
        """The host's own table."""
        return {"positional_embedding_type": "standard"}

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """x_i ⊗ x_j of random tables, x = (row, 1); rows from L on times ``untrained_scale``."""
        scale = 0.8 / settings.d_model**0.5 if settings.scale is None else settings.scale
        generator = np.random.default_rng(settings.seed)
        found: list[FeatureMap] = []
        for _ in range(settings.draws):
            rows = generator.normal(0, scale, (settings.n_rows, settings.d_model))
            rows[settings.train_length :] *= settings.untrained_scale
            found.append(BilinearFeatures(name=self.name, rows=rows))
        return found


class LearnedOffset(Learned):
    """The same table with every row trained (Huang et al. 2024)."""

    name = "learned_offset"
    trains_with_offset = True

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """Free rows: one parameter a pair of positions and one a key."""
        return [FreeRows(name=self.name, n_rows=settings.n_rows)]


LEARNED, LEARNED_OFFSET = Learned(), LearnedOffset()
