"""C7: models of several layers and heads, with MLPs and norms, asked at every position.

The head that does the job is the one with the most attention at the target offset; that it does
the job is confirmed by ablation: its output set to zero, and each other head's in turn.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lenprobe.ablation import ablated
from lenprobe.claims.base import FAR, TRAIN_LENGTH, Claim, Effort
from lenprobe.hosts import host_of
from lenprobe.models import build
from lenprobe.probes.carrier import Carrier, carrier_of
from lenprobe.probes.equivariance import equivariance_of
from lenprobe.probes.pinning import Pinning, pinning_of
from lenprobe.reading import LayerReading, random_tokens, stream
from lenprobe.tasks import FixedOffset
from lenprobe.training import accuracy_by_length, correct, fit

OFFSET, HEADS, WIDTH = 3, 4, 64
_SEQUENCES = 256
_STEPS = 1000
_RATE = 1e-3  # deeper models are trained more slowly than one-head ones


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepModel:
    """One trained model and its working head."""

    encoding: str
    layers: int
    seed: int
    near: float
    """Accuracy at the training length."""
    far: float
    """At three times that."""
    head: tuple[int, int]
    """Layer and head with the most attention at the target offset."""
    drops: np.ndarray
    """Accuracy lost at the training length when a head is ablated, [layer, head]."""
    shared: tuple[int, float]
    """How many heads have most of their attention at the target, and what ablating all costs."""
    mass: tuple[float, float]
    """The working head's mean attention at the target, at both lengths."""
    carrier: Carrier | None
    """Of the working head; None for encodings without a rotation."""
    error: float
    """Equivariance of its logits in float64."""
    pinning: Pinning

    @property
    def own(self) -> float:
        """What ablating the working head costs."""
        return float(self.drops[self.head])

    @property
    def others(self) -> float:
        """The most that ablating another head costs."""
        rest = self.drops.copy()
        rest[self.head] = -np.inf
        return float(rest.max())

    @property
    def confirmed(self) -> bool:
        """Whether ablation says that this head, and no other, does the job."""
        return self.own >= 0.5 and self.others <= 0.1

    @property
    def same_signs(self) -> bool:
        """C2 to C5 on the working head: exact, at the target, diluted; or pinned."""
        if self.carrier is None:
            return self.pinning.inside and self.pinning.strength >= 5 * self.pinning.uniform
        peak = int(self.carrier.kernel[:FAR].argmax()) == OFFSET
        return self.error <= 1e-10 and peak and self.mass[1] < self.mass[0]

    @property
    def sentence(self) -> str:
        """Its figures."""
        name = f"{self.encoding} {self.layers}L seed {self.seed}"
        head = "L{}H{}".format(*self.head)
        if self.carrier is None:
            rule = f"pinned {self.pinning.strength / self.pinning.uniform:.0f} × uniform"
        else:
            peak = int(self.carrier.kernel[:FAR].argmax())
            rule = f"peak {peak}, alignment {self.carrier.alignment:.2f}, E {self.error:.0e}"
        return (
            f"{name}: {self.near:.2f} at {TRAIN_LENGTH}, {self.far:.2f} at {FAR}; {head}: {rule}, "
            f"mass {self.mass[0]:.2f} to {self.mass[1]:.2f}, ablated −{max(self.own, 0):.2f}, "
            f"others at most −{max(self.others, 0):.2f}, all {self.shared[0]} at the offset "
            f"together −{max(self.shared[1], 0):.2f}"
        )


def train_deep(effort: Effort, *, progress: bool = False) -> list[DeepModel]:
    """Trains RoPE and learned absolute models of each depth."""
    return [
        _study(encoding, layers, seed, progress=progress)
        for layers in effort.layers
        for encoding in ("rope", "learned")
        for seed in range(effort.deep_seeds)
    ]


def _study(encoding: str, layers: int, seed: int, *, progress: bool) -> DeepModel:
    task = FixedOffset(OFFSET)
    model = build(
        encoding,
        n_layers=layers,
        n_heads=HEADS,
        d_model=WIDTH,
        attn_only=False,
        normalization_type="LN",
        n_ctx=2 * FAR,
        seed=seed,
    )
    settings: dict[str, Any] = {"learning_rate": _RATE, "seed": seed, "progress": progress}
    fit(model, task, [TRAIN_LENGTH], _STEPS, **settings)
    accuracy = accuracy_by_length(model, task, [TRAIN_LENGTH, FAR], sequences=_SEQUENCES)
    weights = [weight_at(model, OFFSET, length) for length in (TRAIN_LENGTH, FAR)]
    layer, head = np.unravel_index(int(weights[0].argmax()), weights[0].shape)
    where = int(layer), int(head)
    carrier = carrier_of(model, *where, target=OFFSET, length=FAR) if encoding == "rope" else None
    error = equivariance_of(model, *where, dtypes=["float64"]).errors["float64"]
    return DeepModel(
        encoding=encoding,
        layers=layers,
        seed=seed,
        near=accuracy.at(TRAIN_LENGTH),
        far=accuracy.at(FAR),
        head=where,
        drops=ablation_drops(model, task, TRAIN_LENGTH, seed=seed),
        shared=_shared(model, task, weights[0], seed),
        mass=(float(weights[0][where]), float(weights[1][where])),
        carrier=carrier,
        error=error,
        pinning=pinning_of(model, *where),
    )


def _shared(model: Any, task: FixedOffset, weight: np.ndarray, seed: int) -> tuple[int, float]:
    heads = [(int(layer), int(head)) for layer, head in np.argwhere(weight > 0.5)]
    return len(heads), _drop(model, task, TRAIN_LENGTH, heads, _SEQUENCES, seed)


def _drop(
    model: Any,
    task: FixedOffset,
    length: int,
    heads: list[tuple[int, int]],
    sequences: int,
    seed: int,
) -> float:
    """Accuracy lost when the heads' outputs are set to zero."""
    generator = torch.Generator().manual_seed(seed)
    tokens = task.sample(sequences, length, generator=generator)
    asked = task.sources(length) >= 0
    whole = correct(model, task, tokens)[:, asked].mean()
    with ablated(model, heads):
        return float(whole - correct(model, task, tokens)[:, asked].mean())


def weight_at(model: Any, offset: int, length: int) -> np.ndarray:
    """Mean attention at an offset on random tokens, [layer, head]."""
    host = host_of(model)
    tokens = random_tokens(host.d_vocab, _SEQUENCES, length)

    def reduce(reading: LayerReading) -> np.ndarray:
        diagonal = reading.pattern.diagonal(-offset, dim1=-2, dim2=-1)
        return np.asarray(diagonal.double().mean(dim=(0, 2)).cpu())

    return np.stack([*stream(model, tokens, reduce).values()])


def ablation_drops(
    model: Any, task: FixedOffset, length: int, *, sequences: int = _SEQUENCES, seed: int = 0
) -> np.ndarray:
    """Accuracy lost when each head's output is set to zero, [layer, head].

    >>> from lenprobe.models import build
    >>> ablation_drops(build("rope", n_heads=2), FixedOffset(1), 8, sequences=8).shape
    (1, 2)
    """
    host = host_of(model)
    return np.array(
        [
            [
                _drop(model, task, length, [(layer, head)], sequences, seed)
                for head in range(host.n_heads)
            ]
            for layer in range(host.n_layers)
        ]
    )


def transfer(models: list[DeepModel]) -> Claim:
    """C7."""
    rope = [each for each in models if each.encoding == "rope"]
    learned = [each for each in models if each.encoding == "learned"]
    apart = min(each.far for each in rope) > max(each.far for each in learned)
    signs = all(each.same_signs for each in models)
    confirmed = all(each.confirmed for each in rope)
    return Claim(
        name="C7",
        text="all of it transfers to models of several layers and heads, with MLPs and norms",
        figure=" | ".join(each.sentence for each in models),
        threshold=(
            "RoPE above learned at 48; the head found has the signs of C2 to C5; ablating it costs "
            "≥ 0.5, any other ≤ 0.1 (RoPE)"
        ),
        holds=bool(apart and signs and confirmed),
    )
