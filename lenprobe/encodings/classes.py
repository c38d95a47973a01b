"""The encoding classes that α_L compares: those of models, and two that no model here has.

``table`` is a free relative table, one parameter an offset: the most that any function of the
offset can do. ``alibi_free`` is ALiBi with a slope of either sign, which no model has either: its
slopes are fixed and penalise distance.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lenprobe import encodings
from lenprobe.encodings.base import FeatureSettings
from lenprobe.encodings.features import FeatureMap, OffsetFeatures, PairFeatures, PairFunction


def _table(settings: FeatureSettings) -> list[FeatureMap]:
    """One-hot of the offset."""

    def one_hot(offset: np.ndarray) -> np.ndarray:
        return np.eye(settings.n_rows)[offset]

    return [OffsetFeatures(name="table", function=one_hot)]


def _alibi_free(settings: FeatureSettings) -> list[FeatureMap]:
    """−Δ over the training length, temperature of either sign."""

    def distance(offset: np.ndarray) -> np.ndarray:
        return -offset[:, None] / settings.train_length

    return [OffsetFeatures(name="alibi_free", function=distance)]


_EXTRA: dict[str, Callable[[FeatureSettings], list[FeatureMap]]] = {
    "table": _table,
    "alibi_free": _alibi_free,
}

CLASSES = (*encodings.NAMES, *_EXTRA)
"""Every encoding that has a name."""


def encoding_class(
    encoding: "str | FeatureMap | Sequence[FeatureMap] | PairFunction",
    *,
    train_length: int,
    longest: int,
    **settings: Any,
) -> list[FeatureMap]:
    """The feature maps of an encoding: one, or one a random table.

    >>> [each.name for each in encoding_class("table", train_length=4, longest=8)]
    ['table']

    Args:
        encoding: a name of ``CLASSES``, a function φ of the queries and keys of pairs, or feature
            maps.
        train_length: L, in tokens.
        longest: the longest length asked for.
        settings: of :class:`lenprobe.encodings.base.FeatureSettings`, for encodings by name.

    Raises:
        ValueError: the name is unknown, or a setting is out of its range.
        TypeError: a setting is unknown, or there is nothing that it could set.
    """
    if isinstance(encoding, str):
        made = FeatureSettings(train_length=train_length, n_rows=longest, **settings)
        if encoding in _EXTRA:
            return _EXTRA[encoding](made)
        if encoding not in CLASSES:
            raise ValueError(f"encoding={encoding!r} is unknown; take one of {', '.join(CLASSES)}")
        return encodings.get(encoding).features(made)
    if settings:
        raise TypeError(f"settings {sorted(settings)} are for encodings by name; leave them out")
    if isinstance(encoding, FeatureMap):
        return [encoding]
    if callable(encoding):
        name = getattr(encoding, "__name__", "yours").replace("<lambda>", "yours")
        return [PairFeatures(name=name, function=encoding)]
    return list(encoding)
