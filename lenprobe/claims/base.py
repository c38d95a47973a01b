"""What a claim is, and how much is trained to test it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lenprobe.grid import GRIDS, Grid
from lenprobe.typing import Json

TRAIN_LENGTH = 16
"""L of every claim."""
FAR = 3 * TRAIN_LENGTH
"""Where generalisation is judged."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim and what was measured."""

    name: str
    """C1 to C13."""
    text: str
    figure: str
    """What was measured, with its spread over seeds."""
    threshold: str
    """When the claim holds."""
    holds: bool | None
    """None: reported, not scored."""

    @property
    def verdict(self) -> str:
        """In words."""
        return "reported" if self.holds is None else "holds" if self.holds else "does not hold"

    def as_dict(self) -> Json:
        """Plain values."""
        return {**vars(self), "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is trained; the quick one is smaller, and as honest."""

    offsets: tuple[int, ...] = (1, 2, 3, 5, 8)
    """Of the fixed-offset tasks."""
    seeds: int = 5
    """Of every one-head model outside of the grid."""
    steps: int = 2000
    """Most optimiser steps of those models."""
    layers: tuple[int, ...] = (2, 4)
    """Of the deep models."""
    deep_seeds: int = 2
    grid: Grid = GRIDS["full"]


FULL = Effort()
QUICK = Effort(offsets=(1, 3, 8), seeds=2, layers=(2,), deep_seeds=1, grid=GRIDS["quick"])


def span(values: Iterable[float], digits: int = 3) -> str:
    """The least and the largest value.

    >>> span([0.5, 0.25])
    '0.250 to 0.500'
    """
    found = np.array(list(values), dtype=float)
    low, high = (f"{value:.{digits}f}" for value in (found.min(), found.max()))
    return low if low == high else f"{low} to {high}"
