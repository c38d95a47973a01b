"""Time and peak memory of a scan of SmolLM2, against the same model's plain forward pass.

Each runs in a process of its own, whose peak resident memory is its own; the fastest of several
repeats counts, after one that is not counted. The third peer is the way without a library: cache
everything, then NumPy.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from lenprobe.pretrained import smollm2_folder
from lenprobe.results import versions
from lenprobe.typing import Json

LENGTH, BATCH = 512, 4
TIMES, MEMORY = 1.3, 1.15
"""The ratios to the plain forward pass that are wanted."""

_SCRIPT = """
import json, resource, sys, time
import numpy as np, torch
from lenprobe.pretrained import smollm2
from lenprobe.probes.scan import scan
from lenprobe.reading import random_tokens

kind, repeats, length, batch = sys.argv[1], *map(int, sys.argv[2:])
model = smollm2()
tokens = random_tokens(49000, batch, length)

def plain():
    with torch.no_grad():
        model(tokens)

def scanned():
    scan(model, tokens, batch=batch, progress=False)

def cached():
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    for layer in range(model.cfg.n_layers):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"].double().numpy()
        kernel = np.where(scores > -1e30, scores, 0.0).mean(axis=0)
        [np.diagonal(kernel, -offset, 1, 2).mean(axis=1) for offset in range(length)]

run = {"plain": plain, "scan": scanned, "cached": cached}[kind]
run()
times = []
for _ in range(repeats):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": min(times), "megabytes": peak / (1024 if sys.platform != "darwin"
      else 1024**2)}))
"""


@dataclass(frozen=True, kw_only=True)
class ScanBench:
    """Seconds and peak megabytes of the scan and of its peers."""

    scan: Json
    plain: Json
    cached: Json

    @property
    def ratios(self) -> tuple[float, float]:
        """Time and peak memory over the plain forward pass's."""
        time, memory = (self.scan[key] / self.plain[key] for key in ("seconds", "megabytes"))
        return time, memory

    @property
    def holds(self) -> bool:
        """Whether both ratios are what is wanted."""
        time, memory = self.ratios
        return time <= TIMES and memory <= MEMORY

    def as_dict(self) -> Json:
        """Plain values."""
        time, memory = self.ratios
        return {
            **vars(self),
            "time_ratio": time,
            "memory_ratio": memory,
            "wanted": {"time": TIMES, "memory": MEMORY},
            "holds": self.holds,
            "length": LENGTH,
            "batch": BATCH,
            "versions": versions(),
        }

    def summary(self) -> str:
        """One line a run, and the ratios."""
        lines = [
            f"{name}: {each['seconds']:.2f} s, peak {each['megabytes']:.0f} MB"
            for name, each in (
                ("plain forward", self.plain),
                ("scan", self.scan),
                ("full cache, then NumPy", self.cached),
            )
        ]
        time, memory = self.ratios
        return "\n".join(
            [
                f"SmolLM2 at {LENGTH} tokens, batch {BATCH}",
                *lines,
                f"scan over plain: time {time:.2f} (wanted ≤ {TIMES}), memory {memory:.2f} "
                f"(wanted ≤ {MEMORY}): {'holds' if self.holds else 'does not hold'}",
            ]
        )


def bench_scan(*, repeats: int = 3) -> ScanBench:
    """Times a scan against its peers; takes a few minutes on two cores.

    Raises:
        ValueError: ``repeats`` is below 1.
        FileNotFoundError: SmolLM2 is not fetched.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} times nothing; take 1 or more")
    if not smollm2_folder().is_dir():
        raise FileNotFoundError("SmolLM2 is not fetched; run `lenprobe fetch smollm2` first")
    return ScanBench(**{kind: _run(kind, repeats) for kind in ("plain", "scan", "cached")})


def _run(kind: str, repeats: int) -> Any:
    numbers = [str(number) for number in (repeats, LENGTH, BATCH)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, kind, *numbers],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])
