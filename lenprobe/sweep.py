"""Running a grid of trained models on any executor, and going on where it was stopped.

A cell's result is one file in ``OUT/cells``, named by the hash of the cell's specification, and
written whole or not at all. So a sweep that was killed loses the cells at work and nothing else;
the same call goes on. A file that is not whole is noticed by its digest, and the cell redone. A
folder keeps one grid, made with one set of versions: ``OUT/grid.json`` says which.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenprobe.grid import FORMAT, GRIDS, Cell, Grid, run_cell
from lenprobe.results import versions
from lenprobe.typing import Json

if TYPE_CHECKING:
    import pandas as pd

FRAME = "sweep.parquet"
"""The table of a finished sweep, in its folder."""
_GRID, _CELLS = "grid.json", "cells"


class SweepStopped(RuntimeError):
    """A sweep ended before its last cell; what is done is kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """A finished grid."""

    grid: Grid
    frame: "pd.DataFrame"
    """One row a model and length: ``task``, ``encoding``, ``architecture``, ``seed``, ``steps``,
    ``loss`` (nats, over the last 100 steps), ``fit_accuracy`` (at the training length),
    ``fitted``, ``length``, ``accuracy`` (of the new queries), ``rule_share`` (of new queries whose
    unique argmax of the best head's positional kernel is the right key), ``content_share`` (of the
    variance of the heads' logits)."""
    folder: Path
    trained: int
    """Cells that this call trained; the others were there."""
    seconds: float

    @property
    def fitted(self) -> int:
        """Models that learned their task at the training length."""
        return int(self.frame.groupby(_MODEL, sort=False)["fitted"].first().sum())

    def summary(self) -> str:
        """How many models fitted, and the accuracy beyond the training length."""
        grid = self.grid
        shown = self.frame.groupby(["architecture", "task", "encoding"], sort=False)["accuracy"]
        table = shown.mean().unstack().round(2)
        lines = [
            f"{grid.models} models in {len(grid.cells())} cells, {self.fitted} fitted at "
            f"n = {grid.train_length}; {self.trained} cells trained in {self.seconds:.0f} s",
            f"accuracy of new queries, mean over seeds and N = {[*grid.lengths]}:",
            table.to_string(),
            f"table: {self.folder / FRAME}",
        ]
        return "\n".join(lines)

    def as_dict(self) -> Json:
        """What ``lenprobe sweep --json`` prints."""
        shown = self.frame.groupby(["architecture", "task", "encoding"], sort=False)["accuracy"]
        return {
            "grid": asdict(self.grid),
            "models": self.grid.models,
            "cells": len(self.grid.cells()),
            "fitted": self.fitted,
            "trained_cells": self.trained,
            "accuracy": [
                {"architecture": a, "task": t, "encoding": e, "accuracy": float(value)}
                for (a, t, e), value in shown.mean().items()
            ],
            "frame": str(self.folder / FRAME),
            "seconds": round(self.seconds, 2),
            "versions": versions(),
        }


_MODEL = ["architecture", "task", "encoding", "seed"]


def sweep(
    grid: Grid | str,
    out: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Sweep:
    """Trains and measures every cell of a grid that the folder does not hold yet.

    >>> import tempfile
    >>> from lenprobe.grid import Grid
    >>> one = Grid(tasks=("offset:3",), encodings=("rope",), architectures=("1L1H",), seeds=1,
    ...            steps=5)
    >>> found = sweep(one, tempfile.mkdtemp(), jobs=1, progress=False)
    >>> found.frame["length"].tolist()
    [32, 48, 64]

    Args:
        grid: a :class:`lenprobe.grid.Grid`, or the name ``"full"`` or ``"quick"``.
        out: the folder, made if missing; a folder of the same grid is gone on with.
        executor: any ``concurrent.futures.Executor``, for example
            ``dask.distributed.Client(address).get_executor()``. Cells go out to it and their rows
            come back, so that its workers need no common disk. Local processes by default.
        jobs: local processes; one a core by default. A cell keeps one core busy.
        progress: shows a progress bar with the time left on standard error.

    Returns:
        The sweep, whose table is also in ``out/sweep.parquet``.

    Raises:
        ValueError: the folder holds another grid, one of other versions, or other things; or an
            argument is out of its range.
        SweepStopped: the executor died, or a cell failed. Finished cells are kept.
    """
    start = time.perf_counter()
    grid = named_grid(grid) if isinstance(grid, str) else grid
    if jobs is not None and (jobs < 1 or executor is not None):
        raise ValueError(
            f"jobs={jobs}: 1 or more, and only without an executor, which has its own workers"
        )
    folder = _open(Path(out), grid)
    cells = grid.cells()
    missing = [cell for cell in cells if _rows(folder, cell) is None]
    missing.sort(key=lambda cell: -cell.cost)  # long ones first, so that all workers end together
    with _workers(executor, jobs, len(missing)) as pool:
        _run_all(missing, len(cells), folder, pool, progress)
    frame = load_sweep(folder).frame
    _write_whole(folder / FRAME, frame.to_parquet(index=False))
    return Sweep(
        grid=grid,
        frame=frame,
        folder=folder,
        trained=len(missing),
        seconds=time.perf_counter() - start,
    )


def load_sweep(out: str | Path) -> Sweep:
    """The sweep that a folder holds.

    Raises:
        ValueError: there is none, or cells are missing; the message says how many.
    """
    import pandas as pd

    folder = Path(out)
    grid = _grid_of(folder)
    if grid is None:
        raise ValueError(f"out={str(out)!r} holds no sweep; name a folder that sweep wrote")
    found = [_rows(folder, cell) for cell in grid.cells()]
    missing = sum(rows is None for rows in found)
    if missing:
        raise ValueError(
            f"out={str(out)!r} lacks {missing} of {len(found)} cells; run the same sweep on it "
            "again to train them"
        )
    rows = [row for each in found for row in each or ()]
    return Sweep(grid=grid, frame=pd.DataFrame(rows), folder=folder, trained=0, seconds=0.0)


def named_grid(name: str) -> Grid:
    """The grid of a name.

    Raises:
        ValueError: there is none of that name.
    """
    for known, grid in GRIDS.items():
        if known == name:
            return grid
    raise ValueError(f"grid={name!r} is unknown; take one of {', '.join(GRIDS)}")


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The executor of the dask cluster whose scheduler is at an address, as tcp://host:8786.

    Raises:
        ImportError: dask.distributed is not installed.
        ValueError: no scheduler answers there.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(
            "a cluster needs dask.distributed; install it with pip install 'lenprobe[cluster]'"
        ) from error
    try:
        client: Any = Client(address, timeout="10s", set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dask={address!r}: no scheduler answers ({error}); start one with `dask scheduler`, "
            "and workers with `dask worker ADDRESS --nthreads 1`"
        ) from error
    with client:
        yield client.get_executor(pure=False)


# --- running ------------------------------------------------------------------------------------


@contextmanager
def _workers(executor: Executor | None, jobs: int | None, cells: int) -> Iterator[Executor]:
    """The executor given, which its owner ends, or a pool of processes, which ends here."""
    if executor is not None:
        yield executor
        return
    pool = ProcessPoolExecutor(
        min(jobs or os.cpu_count() or 1, max(1, cells)),
        mp_context=get_context("spawn"),
        initializer=_begin_worker,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Ends this worker when the process that started it is gone, even by kill -9."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _timed(cell: Cell) -> tuple[list[dict[str, Any]], float]:
    start = time.perf_counter()
    return run_cell(cell), time.perf_counter() - start


def _run_all(missing: list[Cell], cells: int, folder: Path, pool: Executor, progress: bool) -> None:
    from tqdm.auto import tqdm

    waiting: dict[Future[Any], Cell] = {}
    bar = tqdm(
        total=sum(cell.cost for cell in missing),
        disable=not progress,
        desc="sweep",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed}<{remaining}]",
    )
    cell = None
    with bar:
        try:
            for cell in missing:
                waiting[pool.submit(_timed, cell)] = cell
            for future in as_completed([*waiting]):
                cell = waiting[future]
                _keep(folder, cell, *future.result())
                del waiting[future]
                bar.set_postfix_str(f"{cells - len(waiting)} of {cells} cells")
                bar.update(cell.cost)
        except Exception as error:
            kept = _keep_finished(folder, cells, missing, waiting)
            at = "" if cell is None else f" at {cell.name}"
            raise SweepStopped(
                f"the sweep stopped{at} ({type(error).__name__}: {error}); {kept} of "
                f"{cells} cells are kept in {str(folder)!r}, and the same command goes on from "
                "there"
            ) from error


def _keep_finished(
    folder: Path, cells: int, missing: list[Cell], waiting: dict[Future[Any], Cell]
) -> int:
    """Keeps what came back beside a failure and drops the rest; how many cells are kept now."""
    for future, cell in waiting.items():
        if not future.cancel() and future.done() and future.exception() is None:
            _keep(folder, cell, *future.result())
    return cells - sum(_rows(folder, cell) is None for cell in missing)


# --- the folder ---------------------------------------------------------------------------------


def _open(folder: Path, grid: Grid) -> Path:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out={str(folder)!r} is a file; name a folder")
    own = _header(grid)
    if folder.exists() and any(folder.iterdir()):
        there = _read_json(folder / _GRID)
        if there is None:
            raise ValueError(
                f"out={str(folder)!r} holds other things than a sweep; name a new or empty folder"
            )
        if there != own:
            differing = sorted(key for key in own if there.get(key) != own[key])
            raise ValueError(
                f"out={str(folder)!r} holds a sweep of another {' and '.join(differing)} "
                f"({_difference(there, own)}); name another folder, since results of two do not mix"
            )
    (folder / _CELLS).mkdir(parents=True, exist_ok=True)
    for left in (folder / _CELLS).glob(".*.tmp"):  # of a sweep that was killed while writing
        left.unlink(missing_ok=True)
    _write_whole(folder / _GRID, (json.dumps(own, indent=2) + "\n").encode())
    return folder


def _header(grid: Grid) -> Json:
    """What a folder's results have in common, as JSON gives it back."""
    found: Json = json.loads(
        json.dumps({"format": FORMAT, "grid": asdict(grid), "versions": versions()})
    )
    return found


def _difference(there: Json, own: Json) -> str:
    for part in ("format", "grid", "versions"):
        mine, theirs = own[part], there.get(part)
        if mine == theirs:
            continue
        if not isinstance(mine, dict) or not isinstance(theirs, dict):
            return f"{theirs} there, {mine} asked"
        name = next(key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key))
        return f"{name}: {theirs.get(name)} there, {mine.get(name)} asked"
    return ""


def _grid_of(folder: Path) -> Grid | None:
    header = _read_json(folder / _GRID)
    if header is None:
        return None
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{folder / _GRID} is of format {header.get('format')}; this version reads {FORMAT}"
        )
    fields: Json = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in header["grid"].items()
    }
    return Grid(**fields)


def _keep(folder: Path, cell: Cell, rows: list[dict[str, Any]], seconds: float) -> None:
    plain = [
        {name: None if value != value else value for name, value in row.items()} for row in rows
    ]
    content = {
        "cell": asdict(cell),
        "rows": plain,
        "digest": _digest(plain),
        "seconds": round(seconds, 3),
    }
    text = json.dumps(content, allow_nan=False) + "\n"
    _write_whole(_path(folder, cell), text.encode())


def _rows(folder: Path, cell: Cell) -> list[dict[str, Any]] | None:
    """What is kept of a cell; None where nothing is, or nothing whole."""
    content = _read_json(_path(folder, cell))
    if content is None or content.get("digest") != _digest(content.get("rows")):
        return None
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in content["rows"]
    ]


def _path(folder: Path, cell: Cell) -> Path:
    return folder / _CELLS / f"{cell.key}.json"


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> Json | None:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_whole(path: Path, data: bytes) -> None:
    """Puts the file in its place once all of it is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
