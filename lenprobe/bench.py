"""Speed, as ratios against a named peer measured in the same run.

Each pair is timed in turns, several times; the ratio is of the fastest of either. Machines are
noisy, so nothing here is a test; the thresholds are what the project wants to hold.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lenprobe.models import build
from lenprobe.portrait import portrait_of
from lenprobe.probes.alpha import alpha
from lenprobe.probes.carrier import evaluate
from lenprobe.probes.scan import scan
from lenprobe.reading import random_tokens, read
from lenprobe.results import versions
from lenprobe.tasks import FixedOffset
from lenprobe.typing import Json

_LENGTH, _BATCH = 256, 32
_OFFSETS = 10**6
_STACKED = 15


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One thing and its peer."""

    name: str
    peer: str
    seconds: float
    peer_seconds: float
    at_most: float
    """The ratio that is wanted."""

    @property
    def ratio(self) -> float:
        """Seconds over the peer's."""
        return self.seconds / self.peer_seconds

    @property
    def holds(self) -> bool:
        """Whether the ratio is what is wanted."""
        return self.ratio <= self.at_most


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What was timed."""

    pairs: tuple[Pair, ...]

    def as_dict(self) -> Json:
        """Plain values."""
        rows = [{**vars(pair), "ratio": pair.ratio, "holds": pair.holds} for pair in self.pairs]
        return {"pairs": rows, "threads": torch.get_num_threads(), "versions": versions()}

    def summary(self) -> str:
        """One line a pair."""
        return "\n".join(
            f"{pair.name}: {pair.seconds:.3f} s, {pair.ratio:.2f} × {pair.peer} "
            f"({pair.peer_seconds:.3f} s); wanted ≤ {pair.at_most:g}: "
            f"{'holds' if pair.holds else 'does not hold'}"
            for pair in self.pairs
        )


def bench(*, repeats: int = 3) -> Bench:
    """Times readings, probes and closed forms against their peers; takes under a minute.

    Args:
        repeats: of each pair; the fastest counts.

    Raises:
        ValueError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} times nothing; take 1 or more")
    model = build("rope", n_ctx=2 * _LENGTH)
    tokens = random_tokens(16, _BATCH, _LENGTH, 0)
    where = f"n = {_LENGTH}, batch {_BATCH}"
    amplitudes, phases, omega = np.random.default_rng(0).uniform(0, 1, (3, 32))

    def cached() -> Any:
        with torch.no_grad():
            return model.run_with_cache(tokens)

    def plain_cosines() -> Any:
        return [
            (amplitudes * np.cos(np.outer(part, omega) + phases)).sum(axis=1)
            for part in np.array_split(np.arange(_OFFSETS), 16)
        ]

    return Bench(
        pairs=(
            _pair(
                f"one layer read and verified at {where}",
                "a cached forward pass",
                lambda: read(model, tokens, 0),
                cached,
                at_most=2.0,
                repeats=repeats,
            ),
            _pair(
                f"every figure of a scan at {where}",
                "a cached forward pass",
                lambda: scan(model, tokens, batch=_BATCH, progress=False),
                cached,
                at_most=2.0,
                repeats=repeats,
            ),
            _pair(
                f"every probe of one head at {where}",
                "a cached forward pass",
                lambda: portrait_of(model, 0, 0, tokens, train_length=16),
                cached,
                at_most=2.0,
                repeats=repeats,
            ),
            _pair(
                "a carrier at 10⁶ offsets",
                "the cosines one by one in NumPy",
                lambda: evaluate(amplitudes, phases, omega, 0.0, _OFFSETS),
                plain_cosines,
                at_most=0.5,
                repeats=repeats,
            ),
            _pair(
                f"{_STACKED} models trained together, 60 steps each",
                "the same ones trained one after another",
                lambda: _train_many(60),
                lambda: _train_each(60),
                at_most=0.25,
                repeats=repeats,
            ),
            _pair(
                "α of an offset under RoPE",
                "one hundred training steps of one model",
                lambda: alpha(FixedOffset(3), "rope"),
                lambda: _train(100),
                at_most=1.0,
                repeats=repeats,
            ),
        )
    )


def _train(steps: int, seed: int = 0) -> None:
    from lenprobe.training import fit

    fit(build("rope", seed=seed), FixedOffset(3), [16], steps, seed=seed, progress=False)


def _train_each(steps: int) -> None:
    for seed in range(_STACKED):
        _train(steps, seed)


def _train_many(steps: int) -> None:
    from lenprobe.stacking import fit_many

    models = [build("rope", seed=seed) for seed in range(_STACKED)]
    fit_many(models, FixedOffset(3), [16], steps, progress=False)


def _pair(
    name: str,
    peer: str,
    own: Callable[[], Any],
    other: Callable[[], Any],
    *,
    at_most: float,
    repeats: int,
) -> Pair:
    seconds: list[float] = []
    peers: list[float] = []
    for _ in range(repeats):
        for run, times in ((own, seconds), (other, peers)):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return Pair(
        name=name, peer=peer, seconds=min(seconds), peer_seconds=min(peers), at_most=at_most
    )
