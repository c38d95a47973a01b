"""The grid of trained models that α_L is tested on, and what one of its cells does.

A cell is a task, an encoding and an architecture, trained from several seeds at once and measured:
accuracy beyond the training length, how often the right key is the unique argmax of the best
head's positional kernel there, and how much of the heads' logits content decides. All that a cell
does follows from its specification, to the bit, on one kind of machine. Definition: ours, after
Han, Chai, Wang.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from lenprobe import encodings
from lenprobe.alpha_table import positional_task
from lenprobe.models import build
from lenprobe.probes.alpha import positional_kernel
from lenprobe.probes.decomposition import Design
from lenprobe.reading import LayerReading, UnverifiedReading, random_tokens, stream
from lenprobe.realize import check_lengths, judge_new, new_queries
from lenprobe.stacking import fit_many
from lenprobe.tasks import Task
from lenprobe.training import WINDOW, correct

FORMAT = 1
"""Raised when what a cell does or keeps changes; results of another number do not mix."""
FITTED = 0.99
"""Accuracy at the training length from which a model counts as having learned the task."""
ENCODINGS = encodings.NAMES
TASKS = ("offset:3", "slot:2", "half-copy", "reversal", "strided")
ARCHITECTURES = ("1L1H", "1L4H", "2L1H", "2L4H", "4L4H")

_SHORTEST = 4  # training lengths of rules that change with the length start here
_CONTENTS = 64  # sequences that kernels are averaged over
_SHAPE = re.compile(r"([1-9]\d*)L([1-9]\d*)H")


def shape_of(architecture: str) -> tuple[int, int]:
    """Layers and heads of an architecture's name.

    >>> shape_of("2L4H")
    (2, 4)

    Raises:
        ValueError: the name says neither.
    """
    found = _SHAPE.fullmatch(architecture)
    if found is None:
        raise ValueError(f"architecture={architecture!r} is unknown; write layers and heads: 2L4H")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One task, encoding and architecture, with everything that its results depend on."""

    task: str
    """As ``lenprobe alpha`` names it: ``offset:3``, ``half-copy``, ..."""
    encoding: str
    architecture: str
    """Layers and heads, as ``2L4H``."""
    seeds: int
    """Models, of seeds 0, 1, 2, ..."""
    train_length: int
    """L: fixed rules train at this length, rules that change with it at all from 4 on."""
    lengths: tuple[int, ...]
    """Measured at, beyond L."""
    steps: int
    """Most optimiser steps."""
    batch: int
    learning_rate: float
    d_model: int
    sequences: int
    """Random ones a length that accuracy is measured on."""

    @property
    def name(self) -> str:
        """For progress and errors."""
        return f"{self.task} × {self.encoding} × {self.architecture}"

    @property
    def key(self) -> str:
        """The first 16 hex digits of the SHA-256 of the specification and the format's number."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return shape_of(self.architecture)

    @property
    def cost(self) -> float:
        """About how long it takes, in units of a one-layer one-head cell of as many models."""
        layers, heads = self.shape
        return self.seeds * layers * (0.6 + 0.4 * heads)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every task with every encoding and architecture.

    >>> len(Grid().cells()), Grid().models
    (175, 2625)
    """

    tasks: tuple[str, ...] = TASKS
    encodings: tuple[str, ...] = ENCODINGS
    architectures: tuple[str, ...] = ARCHITECTURES
    seeds: int = 15
    train_length: int = 16
    lengths: tuple[int, ...] = (32, 48, 64)
    steps: int = 1000
    batch: int = 32
    learning_rate: float = 3e-3
    d_model: int = 32
    sequences: int = 128

    def __post_init__(self) -> None:
        faults = []
        for name in ("tasks", "encodings", "architectures", "lengths"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                faults.append(f"{name}={given}: one or more, each once")
        for name in ("seeds", "steps", "batch", "d_model", "sequences"):
            if getattr(self, name) < 1:
                faults.append(f"{name}={getattr(self, name)}: 1 or more")
        faults += [
            f"encoding {name!r}: one of {', '.join(encodings.NAMES)}"
            for name in self.encodings
            if name not in encodings.NAMES
        ]
        if not 0 < self.learning_rate < math.inf:
            faults.append(f"learning_rate={self.learning_rate}: above 0")
        if faults:
            raise ValueError("no such grid; take " + "; ".join(faults))
        for architecture in self.architectures:
            _, heads = shape_of(architecture)
            if self.d_model % heads:
                raise ValueError(
                    f"d_model={self.d_model} does not divide into the heads of {architecture}"
                )
        for task in self.tasks:
            check_lengths(positional_task(task), self.train_length, self.lengths)

    @property
    def models(self) -> int:
        """How many are trained."""
        return len(self.tasks) * len(self.encodings) * len(self.architectures) * self.seeds

    def cells(self) -> list[Cell]:
        """All cells, in the order of the names."""
        common = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("tasks", "encodings", "architectures")
        }
        return [
            Cell(task=task, encoding=encoding, architecture=architecture, **common)
            for architecture in self.architectures
            for task in self.tasks
            for encoding in self.encodings
        ]


GRIDS: dict[Literal["full", "quick"], Grid] = {
    "full": Grid(),
    "quick": Grid(architectures=("1L1H", "2L4H"), seeds=3, steps=600),
}
"""The grids that have a name."""


def run_cell(cell: Cell) -> list[dict[str, Any]]:
    """Trains and measures the models of a cell; one row a model and length, in plain values.

    A model that did not learn its task is kept, with ``fitted`` False; one whose heads could not
    be read, since it diverged, has NaN for what they say.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(cell)
    finally:
        torch.set_num_threads(threads)


def _run(cell: Cell) -> list[dict[str, Any]]:
    task = positional_task(cell.task)
    layers, heads = cell.shape
    models = [
        build(
            cell.encoding,
            n_layers=layers,
            n_heads=heads,
            d_model=cell.d_model,
            d_vocab=task.d_vocab,
            n_ctx=max(cell.lengths),
            seed=seed,
        )
        for seed in range(cell.seeds)
    ]
    trained = fit_many(
        models,
        task,
        _train_lengths(task, cell.train_length),
        cell.steps,
        batch=cell.batch,
        learning_rate=cell.learning_rate,
        progress=False,
    )
    rows = []
    for seed, (model, history) in enumerate(zip(models, trained, strict=True)):
        fit_accuracy = _accuracy(model, task, cell.train_length, 0, cell.sequences)
        common = {
            "task": cell.task,
            "encoding": cell.encoding,
            "architecture": cell.architecture,
            "seed": seed,
            "steps": history.steps,
            "loss": float(history.loss[-WINDOW:].mean()),
            "fit_accuracy": fit_accuracy,
            "fitted": fit_accuracy >= FITTED,
        }
        shares, content = _head_figures(model, task, cell)
        rows += [
            {
                **common,
                "length": length,
                "accuracy": _accuracy(model, task, length, cell.train_length, cell.sequences),
                "rule_share": share,
                "content_share": content,
            }
            for length, share in zip(cell.lengths, shares, strict=True)
        ]
    return rows


def _train_lengths(task: Task, longest: int) -> list[int]:
    if not task.changes_with_length:
        return [longest]
    return list(range(min(max(_SHORTEST, task.min_length), longest), longest + 1))


def _accuracy(model: Any, task: Task, length: int, train_length: int, sequences: int) -> float:
    """On the new queries of a length."""
    generator = torch.Generator().manual_seed(length)
    tokens = task.sample(sequences, length, generator=generator)
    queries, _ = new_queries(task, length, train_length)
    return float(correct(model, task, tokens)[:, queries].mean())


def _head_figures(model: Any, task: Task, cell: Cell) -> tuple[list[float], float]:
    """What the heads say, in one pass.

    For each length the largest share, over the heads, of new queries whose unique argmax of the
    positional kernel is the right key; then the share of content in the variance of all heads'
    row-centred logits at the longest length.
    """
    tokens = random_tokens(task.d_vocab, _CONTENTS, max(cell.lengths), seed=0)

    def reduce(reading: LayerReading) -> list[tuple[list[float], float, float]]:
        design = Design.of(reading.visible.cpu().numpy())
        found = []
        for head in range(len(reading.heads)):
            logits = reading.logits[:, head].double()
            kernel = positional_kernel(logits)
            hits = [judge_new(kernel, task, n, cell.train_length).share for n in cell.lengths]
            moments = design.moments(logits.cpu().numpy())
            total = float(moments.total.mean())
            found.append((hits, total, total * float(moments.shares()[0, 3])))
        return found

    try:
        every = [head for layer in stream(model, tokens, reduce).values() for head in layer]
    except UnverifiedReading:
        return [math.nan] * len(cell.lengths), math.nan
    best = np.array([hits for hits, _, _ in every]).max(axis=0)
    total = sum(head[1] for head in every)
    content = sum(head[2] for head in every)
    return best.tolist(), content / total if total > 0 else 0.0
