"""C6: the same task with attention that has no softmax.

The pattern is the raw masked logits. A RoPE head's is then a sum of cosines of the offset, and the
rule is the function that is 1 at the target and 0 at the other trained offsets. The smallest θ that
interpolates it is of no use as a measure: the slow pairs are all but equal over 16 tokens, so its
norm is beyond 10¹². So the trained head is compared with the smallest θ that comes as close to the
rule as it does, both up to a scale, which the output matrices set, and up to a constant, which adds
the same to every answer.
"""

import math
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
    """Of the RoPE heads, over the least that comes as close to the rule."""

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
    """‖A‖ of a carrier, scaled to come closest to the rule, over the least norm as close to it."""
    kernel = carrier.kernel[: carrier.train_length]
    shape, wanted = kernel - kernel.mean(), _rule(carrier.target, carrier.train_length)
    scale = (shape @ wanted) / (shape @ shape)
    own = abs(scale) * float(np.linalg.norm(carrier.amplitudes))
    residual = float(np.linalg.norm(scale * shape - wanted))
    least = min_norm(carrier.frequencies, carrier.target, carrier.train_length, residual)
    return own / float(np.linalg.norm(least)) if least.any() else math.inf


def _rule(target: int, train_length: int) -> Float[np.ndarray, " offset"]:
    """1 at the target and 0 elsewhere, less its mean."""
    return np.eye(train_length)[target] - 1 / train_length


def min_norm(
    frequencies: Float[np.ndarray, " pair"], target: int, train_length: int, residual: float
) -> Float[np.ndarray, " feature"]:
    """The smallest θ over cos and sin features that is within ``residual`` of the rule.

    Both are taken less their mean over the trained offsets. θ = 0 is within the rule's own norm,
    √(1 − 1/L), and nothing comes closer than float64 resolves.

    >>> theta = min_norm(np.array([1.0, 0.5]), target=1, train_length=3, residual=0.1)
    >>> angles = np.outer(np.arange(3), [1.0, 0.5])
    >>> made = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) @ theta
    >>> round(float(np.linalg.norm(made - made.mean() - [-1 / 3, 2 / 3, -1 / 3])), 6)
    0.1
    """
    from scipy import optimize

    angles = np.outer(np.arange(train_length), frequencies)
    features = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    left, singular, right = np.linalg.svd(features - features.mean(axis=0), full_matrices=False)
    wanted = _rule(target, train_length)
    along = left.T @ wanted
    outside = max(0.0, float(wanted @ wanted - along @ along))
    if residual >= np.linalg.norm(wanted):
        return np.zeros(features.shape[1])

    def shortfall(log_ridge: float) -> float:
        lost = np.exp(log_ridge) / (singular**2 + np.exp(log_ridge))
        return float(np.sqrt((along**2 * lost**2).sum() + outside) - residual)

    low, high = np.log(1e-26), np.log(1e6)
    ridge = np.exp(low if shortfall(low) > 0 else optimize.brentq(shortfall, low, high))
    return np.asarray(right.T @ (along * singular / (singular**2 + ridge)))


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
            f"{span(linear.norms, 1)} × the least that comes as close to the rule"
        ),
        threshold="medians ≥ 0.85 at 16 and at most half of that at 48",
        holds=holds,
    )
