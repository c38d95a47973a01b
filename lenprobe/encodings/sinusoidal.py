"""Sinusoidal absolute positions (Vaswani et al. 2017): a fixed table, known at any position."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import BilinearFeatures, FeatureMap

BASE = 10000.0


def sinusoids(start: int, length: int, d_model: int) -> Float[np.ndarray, "pos d_model"]:
    """sin(ω_m p) in the even columns and cos(ω_m p) in the odd ones, ω_m = 10⁴^(−2m/d_model).

    >>> sinusoids(0, 1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    omega = BASE ** (-np.arange(0, d_model, 2) / d_model)
    angles = np.multiply.outer(np.arange(start, start + length), omega)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(length, -1)[:, :d_model]


class Sinusoidal(Encoding):
    """The host's table of positions, filled with sinusoids and frozen."""

    name = "sinusoidal"

    def configure(self, **_: Any) -> dict[str, Any]:
        """The host's own table."""
        return {"positional_embedding_type": "standard"}

    def install(self, model: Any) -> None:
        """Fills the table and freezes it."""
        table = model.pos_embed.W_pos
        with torch.no_grad():
            table.copy_(torch.from_numpy(sinusoids(0, *table.shape)))
        table.requires_grad_(False)

    def position_rows(
        self, model: Any, start: int, length: int
    ) -> Float[Tensor, "pos d_model"] | None:
        """By the formula, beyond the table too."""
        rows = torch.from_numpy(sinusoids(start, length, model.cfg.d_model))
        return rows.to(model.W_pos)

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """x_i ⊗ x_j, x = (row, 1)."""
        rows = sinusoids(0, settings.n_rows, settings.d_model)
        return [BilinearFeatures(name=self.name, rows=rows)]


SINUSOIDAL = Sinusoidal()
