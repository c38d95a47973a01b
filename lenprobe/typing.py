"""The names of the axes and the aliases that signatures share.

Axes, as they stand in every shape string:

- ``batch``: token sequences. ``pos``: positions of a sequence.
- ``head``: attention heads of one layer. ``pair``: rotary pairs of a head's dimensions.
- ``query``, ``key``: positions i and j, 0-based. ``offset``: Δ = i − j.
- ``d_head``, ``d_model``, ``d_vocab``: widths, as TransformerLens names them.
- ``length``: sequence lengths of a sweep. ``shift``: position shifts δ.

One-axis strings start with a space, so that they are not read as forward references.
"""

from typing import Any, TypeAlias

import numpy as np

Json: TypeAlias = dict[str, Any]
"""What a JSON object decodes to."""

Array: TypeAlias = np.ndarray
"""A NumPy array, on the CPU; float64 wherever it holds a statistic."""
