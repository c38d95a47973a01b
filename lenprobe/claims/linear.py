"""C6: the same task with attention that has no softmax.

The pattern is the raw masked logits. A RoPE head's is then a sum of cosines of the offset, and the
smallest such sum that interpolates the rule on the trained offsets is known: its norm is what the
trained head's is compared with, both scaled to 1 at the target.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from lenprobe.claims.base import FAR, TRAIN_LENGTH, Claim, Effort, span
from lenprobe.models import build
from lenprobe.probes.carrier import Carrier, carrier_of
from lenprobe.stacking import fit_many
from lenprobe.tasks import FixedOffset
from lenprobe.training import LengthAccuracy, accuracy_by_length

OFFSET = 3
ENCODINGS = ("rope", "learned")


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """Heads without a softmax."""

    accuracy: dict[str, list[LengthAccuracy]]
    """By encoding, over seeds."""
    norms: list[float]
    """Of the RoPE heads, over that of the min-norm interpolant."""

    def at(self, encoding: str, length: int) -> list[float]:
        """Accuracy over seeds."""
        return [each.at(length) for each in self.accuracy[encoding]]


def train_linear(effort: Effort, *, progress: bool = False) -> Linear:
    """Trains heads whose pattern is their raw logits."""
    accuracy, norms = {}, []
    for encoding in ENCODINGS:
        models: list[Any] = [
            build(encoding, attention="linear", n_ctx=FAR, seed=seed)
            for seed in range(effort.seeds)
        ]
        task = FixedOffset(OFFSET)
        fit_many(models, task, [TRAIN_LENGTH], effort.steps, progress=progress)
        lengths = [TRAIN_LENGTH, FAR]
        accuracy[encoding] = [accuracy_by_length(model, task, lengths) for model in models]
        if encoding == "rope":
            norms = [norm_ratio(carrier_of(model, 0, 0, target=OFFSET)) for model in models]
    return Linear(accuracy=accuracy, norms=norms)


def norm_ratio(carrier: Carrier) -> float:
    """‖A‖ / |g(d)| of a carrier, over that of the min-norm interpolant of the rule."""
    own = float(np.linalg.norm(carrier.amplitudes)) / abs(float(carrier.kernel[carrier.target]))
    least = min_norm(carrier.frequencies, carrier.target, carrier.train_length)
    return own / float(np.linalg.norm(least))


def min_norm(
    frequencies: Float[np.ndarray, " pair"], target: int, train_length: int
) -> Float[np.ndarray, " feature"]:
    """The smallest θ over cos and sin features that is 1 at the target and 0 at other offsets.

    >>> theta = min_norm(np.array([1.0, 0.1]), target=1, train_length=3)
    >>> waves = np.outer([1.0], [1.0, 0.1])
    >>> bool(np.isclose(np.concatenate([np.cos(waves), np.sin(waves)], axis=1) @ theta, 1.0)[0])
    True
    """
    angles = np.outer(np.arange(train_length), frequencies)
    features = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    wanted = np.eye(train_length)[target]
    return np.asarray(np.linalg.pinv(features) @ wanted)


def softmax_matters(linear: Linear) -> Claim:
    """C6."""
    parts, holds = [], True
    for encoding in ENCODINGS:
        near, far = linear.at(encoding, TRAIN_LENGTH), linear.at(encoding, FAR)
        parts.append(f"{encoding} {span(near, 2)} at {TRAIN_LENGTH}, {span(far, 2)} at {FAR}")
        middle = np.median(near), np.median(far)
        holds = holds and bool(middle[0] >= 0.85 and middle[1] <= middle[0] / 2)
    return Claim(
        name="C6",
        text="the mechanism is specific to softmax",
        figure=(
            f"linear attention, offset {OFFSET}: {'; '.join(parts)}; norm of the RoPE carrier "
            f"{min(linear.norms):.0e} to {max(linear.norms):.0e} × the min-norm interpolant's"
        ),
        threshold="medians ≥ 0.85 at 16 and at most half of that at 48",
        holds=holds,
    )
