"""α_L of many tasks under many encodings: the table, its heatmap, its page.

The claim that it shows is that of Han, Chai, Wang: from task and encoding alone α_L says whether a
one-head model will generalise. Definition: ours.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from lenprobe.content_tasks import Addition, ContentTask, Induction, Sort
from lenprobe.encodings.classes import CLASSES
from lenprobe.probes.alpha import PENALTY, alpha
from lenprobe.realize import check_lengths
from lenprobe.results import Provenance, Result
from lenprobe.tasks import AbsoluteSlot, FixedOffset, HalfCopy, Reversal, Strided, Task

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

TASKS = ("offset:1", "offset:3", "offset:8", "slot:2", "half-copy", "reversal", "strided")
"""The tasks of the table by default."""
_PLAIN: dict[str, Callable[[], Task]] = {
    "half-copy": HalfCopy,
    "reversal": Reversal,
    "strided": Strided,
}
_CONTENT: dict[str, Callable[[], ContentTask]] = {
    "induction": Induction,
    "sort": Sort,
    "addition": Addition,
}
_NUMBERED: dict[str, Callable[[int], Task]] = {"offset": FixedOffset, "slot": AbsoluteSlot}


@dataclass(frozen=True, kw_only=True, eq=False)
class AlphaTable(Result):
    """α_L by task and encoding."""

    tasks: tuple[str, ...]
    encodings: tuple[str, ...]
    train_length: int
    lengths: tuple[int, ...]
    alpha: Float[np.ndarray, "task encoding length"]
    """Mean over random tables; NaN for tasks out of scope, whose answers depend on content."""
    spread: Float[np.ndarray, "task encoding length"]
    """Standard deviation over them; 0 where there is one."""
    fit_accuracy: Float[np.ndarray, "task encoding"]
    """On the short grid: below 1, the encoding cannot make the rule at all."""

    @property
    def value(self) -> Float[np.ndarray, "task encoding"]:
        """The mean over lengths."""
        return np.asarray(self.alpha.mean(axis=2))

    def summary(self) -> str:
        """The table in text: α, the mean over the lengths."""
        width = max(len(name) for name in self.tasks)
        wide = max(8, *(len(name) for name in self.encodings))
        head = " " * width + "".join(name.rjust(wide + 2) for name in self.encodings)
        rows = [
            name.ljust(width) + "".join(_cell(value).rjust(wide + 2) for value in row)
            for name, row in zip(self.tasks, self.value, strict=True)
        ]
        title = f"α, fitted at n ≤ {self.train_length}, mean over N = {[*self.lengths]}"
        out = [
            name for name, row in zip(self.tasks, self.value, strict=True) if np.isnan(row).all()
        ]
        note = ["", f"out of scope, content decides: {', '.join(out)}"] if out else []
        return "\n".join([title, "", head, *rows, *note])

    def to_frame(self) -> "pd.DataFrame":
        """One row a task, encoding and length."""
        import pandas as pd

        names = ("task", "encoding", "length")
        index = pd.MultiIndex.from_product([self.tasks, self.encodings, self.lengths], names=names)
        fit = np.repeat(self.fit_accuracy.ravel(), len(self.lengths))
        columns = {"alpha": self.alpha.ravel(), "spread": self.spread.ravel(), "fit_accuracy": fit}
        return pd.DataFrame(columns, index=index).reset_index()

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """A heatmap of the mean over lengths."""
        from lenprobe.plots import plot_heatmap

        ax = plot_heatmap(
            self.value,
            row_label="task",
            column_label="encoding",
            value_label="α, mean over N",
            row_ticks=[*self.tasks],
            column_ticks=[*self.encodings],
            ax=ax,
        )
        ax.tick_params(axis="x", labelrotation=30)
        return ax


def alpha_table(
    tasks: Sequence[str | Task | ContentTask] = TASKS,
    encodings: Sequence[str] = CLASSES,
    train_length: int = 16,
    lengths: Iterable[int] = (32, 64, 128),
    *,
    progress: bool = True,
) -> AlphaTable:
    """α_L of every task under every encoding.

    >>> table = alpha_table(["offset:3"], ["rope", "none"], lengths=[32], progress=False)
    >>> table.value.tolist()
    [[1.0, 0.0]]

    Args:
        tasks: names (``offset:3``, ``slot:2``, ``half-copy``, ``reversal``, ``strided``) or tasks;
            content tasks (``induction``, ``sort``, ``addition``) are marked as out of scope.
        encodings: names of ``lenprobe.encodings.classes.CLASSES``.
        train_length: L, in tokens.
        lengths: N, each judged apart.
        progress: shows a progress bar on standard error.

    Raises:
        ValueError: a name is unknown, or a length is not beyond L.
    """
    from tqdm.auto import tqdm

    asked = [named_task(task) if isinstance(task, str) else task for task in tasks]
    unknown = [name for name in encodings if name not in CLASSES]
    if unknown or not asked or not encodings:
        raise ValueError(
            f"encodings={[*encodings]}, tasks={[*tasks]}: give one or more of each; encodings are "
            f"{', '.join(CLASSES)}"
        )
    wanted = tuple(int(length) for length in lengths)
    for task in asked:
        if not isinstance(task, ContentTask):
            check_lengths(task, train_length, wanted)
    cells = [(task, encoding) for task in asked for encoding in encodings]
    bar = tqdm(cells, desc="α", unit="cell") if progress else cells
    found = [
        _out_of_scope(wanted)
        if isinstance(task, ContentTask)
        else _row(task, encoding, train_length, wanted)
        for task, encoding in bar
    ]
    shape = (len(asked), len(encodings), len(wanted))
    return AlphaTable(
        provenance=Provenance(
            verb="alpha_table",
            model="encoding classes, no model",
            settings={"loss": "mean cross-entropy + λ/2 ‖θ‖²", "penalty": PENALTY},
        ),
        tasks=tuple(task.name for task in asked),
        encodings=tuple(encodings),
        train_length=train_length,
        lengths=wanted,
        alpha=np.array([row[0] for row in found]).reshape(shape),
        spread=np.array([row[1] for row in found]).reshape(shape),
        fit_accuracy=np.array([row[2] for row in found]).reshape(shape[:2]),
    )


def _row(
    task: Task, encoding: str, train_length: int, lengths: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, float]:
    found = alpha(task, encoding, train_length, lengths)
    return found.alpha, found.spread, float(found.fit_accuracy.mean())


def _out_of_scope(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, float]:
    nothing = np.full(len(lengths), np.nan)
    return nothing, nothing, float("nan")


def _cell(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}"


def named_task(name: str) -> Task | ContentTask:
    """The task of a name.

    >>> named_task("offset:3").name
    'offset 3'

    Raises:
        ValueError: there is none of that name.
    """
    kind, _, number = name.partition(":")
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _CONTENT:
        return _CONTENT[name]()
    if kind in _NUMBERED and number.isdecimal():
        return _NUMBERED[kind](int(number))
    raise ValueError(
        f"task={name!r} is unknown; take offset:D, slot:P, {', '.join(_PLAIN)}, as offset:3, or "
        f"{', '.join(_CONTENT)}, whose answers depend on the content"
    )


def positional_task(name: str) -> Task:
    """The task of a name, which has a source map.

    Raises:
        ValueError: there is none of that name, or its answers depend on the content.
    """
    task = named_task(name)
    if isinstance(task, ContentTask):
        raise ValueError(
            f"task={name!r} has no source map, since its answers depend on the content; take "
            f"offset:D, slot:P, {', '.join(_PLAIN)}"
        )
    return task


def write_alpha(table: AlphaTable, path: Path) -> None:
    """Writes the table as a page with a heatmap."""
    from matplotlib.figure import Figure

    from lenprobe.report import Section, Table, picture_of, write

    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    table.plot(figure.subplots())
    rows = [
        [name, *(_cell(value) for value in row)]
        for name, row in zip(table.tasks, table.value, strict=True)
    ]
    section = Section(
        title="α by task and encoding",
        text=[
            f"Each encoding's kernel was fitted to the rule at n ≤ {table.train_length}, without "
            "any network, and judged on new queries up to "
            f"N = {', '.join(str(n) for n in table.lengths)}: the share whose largest value is at "
            "the right key alone."
        ],
        blocks=[
            picture_of(figure, alt="α by task and encoding"),
            Table(columns=["task", *table.encodings], rows=rows),
        ],
    )
    lead = "α, computed without training, says which encoding carries which rule to new lengths."
    write(path, "How far a positional rule carries", lead, [section])
