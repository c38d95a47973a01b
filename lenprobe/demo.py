"""The main job: a RoPE head and a learned-absolute head learn one task, and both are read.

Both are one-layer, one-head models of the same width, trained from the same seed to copy the token
``offset`` places back, on sequences no longer than ``train_length``. What differs is how they know
positions, and what that does beyond the training length is measured: accuracy, equivariance,
carrier. The claims shown are those of arXiv 2607.18759; ``lenprobe study`` tests them over seeds.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lenprobe.models import build
from lenprobe.probes.carrier import Carrier, carrier_of
from lenprobe.probes.equivariance import Equivariance, equivariance_of
from lenprobe.reading import random_tokens, read
from lenprobe.results import versions
from lenprobe.tasks import FixedOffset
from lenprobe.training import LengthAccuracy, accuracy_by_length, fit
from lenprobe.typing import Json
from lenprobe.views import MAX_TOKENS, AttentionView, attention_view

ENCODINGS = ("rope", "learned")
TITLES = {"rope": "RoPE", "learned": "learned absolute"}
RATIOS = (1, 1.5, 2, 3, 4, 8)
"""Lengths measured, over the training length: 16, 24, 32, 48, 64 and 128 for 16."""

_REACH = 64  # offsets of the closed form, over the training length
_SEQUENCES = 64  # contents that carriers are averaged over
_SHORTEST, _LONGEST = 4, 128  # training lengths that the demo takes


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoHead:
    """One trained head and what was read of it."""

    encoding: str
    steps: int
    """Training steps taken; fewer than asked for where the task was solved before."""
    accuracy: LengthAccuracy
    equivariance: Equivariance
    carrier: Carrier
    """Measured on sequences of the longest length; for RoPE beside the closed form."""
    trained_peak: int
    """Peak of the carrier measured on sequences of the training length alone."""
    views: Mapping[int, AttentionView]
    """Attention on one random sequence, by its length."""

    def as_dict(self) -> Json:
        """What ``lenprobe demo --json`` prints of this head."""
        lengths = (int(length) for length in self.accuracy.lengths)
        accuracy = (float(value) for value in self.accuracy.last_query)
        carrier = self.carrier
        return {
            "accuracy": dict(zip(lengths, accuracy, strict=True)),
            "equivariance": dict(self.equivariance.errors),
            "carrier": {
                "peak": carrier.peak,
                "alignment": carrier.alignment,
                "margin": carrier.margin,
                "horizon": carrier.horizon,
                "horizon_searched_to": int(carrier.offsets[-1]),
                "rank_99": carrier.rank_99,
            },
            "steps": self.steps,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Demo:
    """Both heads, the report, and how long it took."""

    offset: int
    train_length: int
    seed: int
    steps: int
    """Most training steps a head."""
    heads: Mapping[str, DemoHead]
    report: Path | None
    """The page written; None where no folder was given."""
    seconds: float

    def as_dict(self) -> Json:
        """The whole finding in plain values.

        ``horizon`` is infinite where none lies up to ``horizon_searched_to``, ``alignment`` NaN
        where nothing rotates; ``lenprobe demo --json`` prints null for both.
        """
        return {
            **{name: head.as_dict() for name, head in self.heads.items()},
            "offset": self.offset,
            "train_length": self.train_length,
            "seed": self.seed,
            "report": None if self.report is None else str(self.report),
            "seconds": round(self.seconds, 2),
            "versions": versions(),
        }

    def summary(self) -> str:
        """The finding as a table in text."""
        title = (
            f"copy the token {self.offset} back, trained at n ≤ {self.train_length} "
            f"(seed {self.seed}); chance {self.heads['rope'].accuracy.chance:.4f}"
        )
        rows = [("", *(TITLES[name] for name in self.heads)), *table_of(self.heads)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        end = [] if self.report is None else ["", f"report: {self.report}"]
        return "\n".join([title, "", *lines, *end, f"took {self.seconds:.0f} s"])


def demo(
    *,
    offset: int = 3,
    train_length: int = 16,
    seed: int = 0,
    steps: int = 2000,
    out: str | Path | None = None,
    progress: bool = True,
) -> Demo:
    """Trains both heads, reads them, and writes ``out/report.html``.

    Takes under a minute on two cores at the defaults.

    Args:
        offset: how far back the token to copy stands; 1 to ``train_length − 1``.
        train_length: longest sequence trained on, in tokens; 4 to 128.
        seed: of the weights, the batches and the contents read.
        steps: most training steps a head.
        out: folder of the report, made if missing; no report where None.
        progress: shows progress bars on standard error.

    Raises:
        ValueError: an argument is out of its range; all faults are named.
        OSError: ``out`` cannot be written to; known before anything is trained.
    """
    start = time.perf_counter()
    _check(offset, train_length, steps)
    folder = None if out is None else _folder(out)
    heads = {
        name: _study(name, offset, train_length, seed, steps, progress=progress)
        for name in ENCODINGS
    }
    result = Demo(
        offset=offset,
        train_length=train_length,
        seed=seed,
        steps=steps,
        heads=heads,
        report=None if folder is None else folder / "report.html",
        seconds=time.perf_counter() - start,
    )
    if result.report is not None:
        from lenprobe.report.demo import write_demo

        write_demo(result, result.report)
    return replace(result, seconds=time.perf_counter() - start)


def table_of(heads: Mapping[str, DemoHead]) -> list[tuple[str, ...]]:
    """The summary's rows: what was measured, then one cell a head."""
    every = list(heads.values())
    rows = []
    for index, length in enumerate(every[0].accuracy.lengths):
        note = " (trained)" if index == 0 else ""
        cells = (f"{head.accuracy.last_query[index]:.3f}" for head in every)
        rows.append((f"accuracy at n = {length}{note}", *cells))
    for dtype in every[0].equivariance.errors:
        cells = (f"{head.equivariance.errors[dtype]:.1e}" for head in every)
        rows.append((f"equivariance error, {dtype}", *cells))
    rows += [
        ("carrier peak, trained lengths (offset)", *(str(head.trained_peak) for head in every)),
        ("carrier peak, all lengths (offset)", *(str(head.carrier.peak) for head in every)),
        ("margin over other trained offsets (nats)", *(_sig(h.carrier.margin) for h in every)),
        ("phase alignment at the target", *(_sig(head.carrier.alignment) for head in every)),
        ("rank at 99 % of the energy", *(str(head.carrier.rank_99) for head in every)),
        ("horizon (offset)", *(_horizon(head.carrier) for head in every)),
    ]
    return rows


def _study(
    encoding: str, offset: int, train_length: int, seed: int, steps: int, *, progress: bool
) -> DemoHead:
    lengths = [round(ratio * train_length) for ratio in RATIOS]
    task = FixedOffset(offset)
    model = build(encoding, d_vocab=task.d_vocab, n_ctx=2 * lengths[-1], seed=seed)
    trained = [train_length]
    history = fit(model, task, trained, steps, seed=seed, progress=progress)
    long = random_tokens(task.d_vocab, _SEQUENCES, lengths[-1], seed)
    reach = _REACH * train_length if encoding == "rope" else None
    return DemoHead(
        encoding=encoding,
        steps=history.steps,
        accuracy=accuracy_by_length(model, task, lengths, seed=seed),
        equivariance=equivariance_of(model, 0, 0),
        carrier=carrier_of(model, 0, 0, long, length=reach, target=offset),
        trained_peak=carrier_of(model, 0, 0, target=offset).peak,
        views={n: _view(model, long[:1, :n]) for n in view_lengths(train_length)},
    )


def view_lengths(train_length: int) -> tuple[int, ...]:
    """The training length and three times it, as far as a view can be drawn."""
    return tuple(sorted({train_length, min(3 * train_length, MAX_TOKENS)}))


def _view(model: Any, tokens: Any) -> AttentionView:
    return attention_view(read(model, tokens, 0).pattern[0], tokens[0].tolist())


def _folder(out: str | Path) -> Path:
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out={str(out)!r} is a file; name a folder for report.html")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check(offset: int, train_length: int, steps: int) -> None:
    faults = []
    if not _SHORTEST <= train_length <= _LONGEST:
        faults.append(
            f"train_length={train_length} is out of range; take {_SHORTEST} to {_LONGEST} tokens"
        )
    if not 1 <= offset < train_length:
        faults.append(
            f"offset={offset} does not fit in sequences of train_length={train_length}; take 1 to "
            f"{train_length - 1}, or a longer train_length"
        )
    if steps < 1:
        faults.append(f"steps={steps} trains nothing; take 1 or more")
    if faults:
        raise ValueError("; ".join(faults))


def _sig(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _horizon(carrier: Carrier) -> str:
    last = carrier.offsets[-1]
    return f"{carrier.horizon:.0f}" if math.isfinite(carrier.horizon) else f"none up to {last}"
