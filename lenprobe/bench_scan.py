"""Time and peak memory of a scan of SmolLM2, against the same model's plain forward pass.

Each runs in a process of its own, whose peak resident memory is its own. They take turns, so that a
machine that slows down slows all of them; the fastest of several rounds counts, after one that is
not counted. The third peer is the way without a library: cache everything, then NumPy.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

kind, length, batch = sys.argv[1], *map(int, sys.argv[2:])
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
for _ in sys.stdin:
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1024**2 if sys.platform == "darwin" else 1024
    print(json.dumps({"seconds": seconds, "megabytes": peak / unit}), flush=True)
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
        RuntimeError: a process that is timed ended by itself.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} times nothing; take 1 or more")
    if not smollm2_folder().is_dir():
        raise FileNotFoundError("SmolLM2 is not fetched; run `lenprobe fetch smollm2` first")
    with contextlib.ExitStack() as stack:
        turns = {kind: stack.enter_context(_peer(kind)) for kind in ("plain", "scan", "cached")}
        rounds = [{kind: turn() for kind, turn in turns.items()} for _ in range(1 + repeats)]
    return ScanBench(
        **{
            kind: {
                "seconds": min(each[kind]["seconds"] for each in rounds[1:]),
                "megabytes": rounds[-1][kind]["megabytes"],
            }
            for kind in turns
        }
    )


@contextlib.contextmanager
def _peer(kind: str) -> Iterator[Callable[[], Json]]:
    """A process that runs once for each line it is sent; yields how to have it run."""
    command = [sys.executable, "-c", _SCRIPT, kind, str(LENGTH), str(BATCH)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as peer,
    ):
        assert peer.stdin is not None and peer.stdout is not None
        into, out = peer.stdin, peer.stdout

        def turn() -> Json:
            into.write("\n")
            into.flush()
            if not (line := out.readline()):
                errors.seek(0)
                raise RuntimeError(
                    f"the process that times {kind!r} ended:\n{errors.read()[-2000:]}"
                )
            return dict(json.loads(line))

        try:
            yield turn
        finally:
            peer.kill()
