"""The grid of trained models: what a cell measures, and that no stop loses or doubles anything."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lenprobe.grid import ARCHITECTURES, FITTED, GRIDS, Cell, Grid, run_cell
from lenprobe.sweep import SweepStopped, dask_executor, load_sweep, sweep

TINY = Grid(
    tasks=("offset:3", "half-copy"),
    encodings=("rope", "learned"),
    architectures=("1L1H", "2L4H"),
    seeds=2,
    steps=8,
    sequences=16,
)
SAME = pd.testing.assert_frame_equal


class Now(Executor):
    """Runs each call at once, in this process; fails from one of them on, if told to."""

    def __init__(self, dies_at=None):
        self.calls, self.dies_at = 0, dies_at

    def submit(self, fn, /, *args, **kwargs):
        self.calls += 1
        future = Future()
        if self.dies_at is not None and self.calls >= self.dies_at:
            future.set_exception(ConnectionError("the worker is gone"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return sweep(TINY, tmp_path_factory.mktemp("sweep"), executor=Now(), progress=False)


def test_the_full_grid_is_the_one_of_the_claims():
    grid = GRIDS["full"]
    assert grid.models == 2625
    assert (len(grid.encodings), len(grid.tasks), grid.seeds) == (7, 5, 15)
    assert grid.architectures == ARCHITECTURES == ("1L1H", "1L4H", "2L1H", "2L4H", "4L4H")
    assert len({cell.key for cell in grid.cells()}) == 175


def test_a_cell_measures_what_was_learned():
    cell = Grid(tasks=("offset:3",), encodings=("rope",), seeds=2, steps=800).cells()[0]
    rows = pd.DataFrame(run_cell(cell))
    assert rows["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["length"].tolist() == [32, 48, 64] * 2
    assert rows["fitted"].all() and (rows["fit_accuracy"] >= FITTED).all()
    assert (rows["accuracy"] >= 0.9).all() and (rows["rule_share"] == 1).all()
    assert (rows["content_share"] < 0.1).all() and (rows["loss"] < 1e-3).all()


def test_a_cell_that_learned_nothing_is_kept_and_marked():
    cell = Grid(tasks=("offset:3",), encodings=("none",), seeds=1, steps=8).cells()[0]
    rows = pd.DataFrame(run_cell(cell))
    assert not rows["fitted"].any() and len(rows) == 3
    assert (rows["accuracy"] < 0.5).all() and (rows["content_share"] > 0.5).all()


def test_a_model_that_diverged_is_kept_and_marked():
    grid = replace(TINY, tasks=("offset:3",), encodings=("rope",), learning_rate=1e30)
    rows = pd.DataFrame(run_cell(grid.cells()[0]))
    assert len(rows) == 6 and not rows["fitted"].any()
    assert rows["rule_share"].isna().all() and rows["content_share"].isna().all()


def test_the_table_has_every_model_once(reference):
    frame = reference.frame
    assert len(frame) == TINY.models * len(TINY.lengths)
    assert not frame.duplicated(["task", "encoding", "architecture", "seed", "length"]).any()
    assert reference.trained == 8 and "16 models in 8 cells" in reference.summary()
    SAME(pd.read_parquet(reference.folder / "sweep.parquet"), frame, check_exact=True)
    assert json.loads(json.dumps(reference.as_dict()))["models"] == 16


def test_a_second_call_trains_nothing(reference):
    executor = Now()
    again = sweep(TINY, reference.folder, executor=executor, progress=False)
    assert again.trained == 0 and executor.calls == 0
    SAME(again.frame, reference.frame, check_exact=True)


@pytest.mark.parametrize("kind", ["processes", "threads", "own pool"])
def test_every_executor_gives_the_same_table(kind, reference, tmp_path):
    if kind == "processes":
        found = sweep(TINY, tmp_path, jobs=2, progress=False)
    elif kind == "threads":
        with ThreadPoolExecutor(1) as pool:
            found = sweep(TINY, tmp_path, executor=pool, progress=False)
    else:
        with ProcessPoolExecutor(1) as pool:
            found = sweep(TINY, tmp_path, executor=pool, progress=False)
    SAME(found.frame, reference.frame, check_exact=True)


def test_on_a_dask_cluster(reference, tmp_path):
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(**settings) as cluster,
        dask_executor(cluster.scheduler_address) as executor,
    ):
        found = sweep(TINY, tmp_path, executor=executor, progress=False)
    SAME(found.frame, reference.frame, check_exact=True)


def test_an_executor_that_dies_leaves_what_was_done(reference, tmp_path):
    with pytest.raises(SweepStopped, match=r"3 of 8 cells are kept in .*goes on from there"):
        sweep(TINY, tmp_path, executor=Now(dies_at=4), progress=False)
    with pytest.raises(ValueError, match="lacks 5 of 8 cells"):
        load_sweep(tmp_path)
    executor = Now()
    found = sweep(TINY, tmp_path, executor=executor, progress=False)
    assert executor.calls == 5
    SAME(found.frame, reference.frame, check_exact=True)


@pytest.mark.parametrize("cut", ["half", "empty", "changed", "foreign"])
def test_a_file_that_is_not_whole_is_redone(cut, reference, tmp_path):
    sweep(TINY, tmp_path, executor=Now(), progress=False)
    victim = sorted((tmp_path / "cells").glob("*.json"))[3]
    whole = victim.read_text()
    content = json.loads(whole)
    content["rows"][0]["accuracy"] = 1.0
    spoiled = {
        "half": whole[: len(whole) // 2],
        "empty": "",
        "changed": json.dumps(content),
        "foreign": "[1]",
    }
    victim.write_text(spoiled[cut])
    executor = Now()
    found = sweep(TINY, tmp_path, executor=executor, progress=False)
    assert executor.calls == 1
    SAME(found.frame, reference.frame, check_exact=True)


SCRIPT = """
import sys
from lenprobe.sweep import sweep
from test_sweep import TINY
if __name__ == "__main__":
    sweep(TINY, sys.argv[1], jobs=2, progress=False)
"""


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize("victim", ["worker", "sweep"])
@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_at_a_random_moment(victim, seed, reference, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    command = [sys.executable, str(script), str(out)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    draw = random.Random(seed)
    wanted = draw.randint(0, 5)  # cells on disk when it is hit
    until = time.monotonic() + 120
    workers = []
    while time.monotonic() < until and process.poll() is None:
        workers = [pid for pid in children_of(process.pid)] or workers
        if len(workers) >= 2 and len(list(out.glob("cells/*.json"))) >= wanted:
            break
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 0.2))
    try:
        os.kill(process.pid if victim == "sweep" else workers[-1], signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was quicker, which is a moment too
    _, errors = process.communicate(timeout=120)
    if victim == "worker" and process.returncode:
        assert "SweepStopped" in errors and "goes on from there" in errors
    if victim == "sweep":
        wait_until_gone(workers)
    found = sweep(TINY, out, executor=Now(), progress=False)
    SAME(found.frame, reference.frame, check_exact=True)
    assert len(list((out / "cells").iterdir())) == 8  # no draft left, no cell twice


def wait_until_gone(pids):
    """Workers notice that their parent is gone and end by themselves."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail(f"workers {pids} outlive their sweep")


def test_another_grid_does_not_mix(reference):
    with pytest.raises(ValueError, match=r"another grid .seeds: 2 there, 3 asked.*another folder"):
        sweep(replace(TINY, seeds=3), reference.folder, executor=Now(), progress=False)


def test_another_version_does_not_mix(reference, tmp_path):
    sweep(TINY, tmp_path, executor=Now(), progress=False)
    header = json.loads((tmp_path / "grid.json").read_text())
    header["versions"]["torch"] = "1.0"
    (tmp_path / "grid.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"another versions \(torch: 1.0 there"):
        sweep(TINY, tmp_path, executor=Now(), progress=False)


def test_the_key_holds_everything():
    cell = TINY.cells()[0]
    changed = {
        "task": "slot:2",
        "encoding": "t5",
        "architecture": "4L4H",
        "seeds": 9,
        "train_length": 15,
        "lengths": (32,),
        "steps": 9,
        "batch": 9,
        "learning_rate": 0.5,
        "d_model": 64,
        "sequences": 9,
    }
    assert changed.keys() == Cell.__dataclass_fields__.keys()
    keys = {replace(cell, **{name: value}).key for name, value in changed.items()}
    assert len(keys | {cell.key}) == len(changed) + 1


@pytest.mark.parametrize(
    "change,message",
    [
        ({"tasks": ()}, r"tasks=\(\): one or more"),
        ({"tasks": ("offset:3", "offset:3")}, "each once"),
        ({"tasks": ("sort",)}, "task='sort' has no source map"),
        ({"encodings": ("rotary",)}, "encoding 'rotary': one of rope"),
        ({"architectures": ("2x4",)}, "write layers and heads: 2L4H"),
        ({"architectures": ("1L3H",)}, "d_model=32 does not divide into the heads of 1L3H"),
        ({"lengths": (16,)}, "lengths holds N=16, not beyond train_length=16"),
        ({"tasks": ("offset:40",), "lengths": (32,)}, "task 'offset 40' has no new query"),
        ({"seeds": 0, "steps": -1}, "seeds=0: 1 or more; steps=-1: 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: above 0"),
    ],
)
def test_bad_grids(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_bad_folders_and_workers(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        sweep(TINY, tmp_path / "file", executor=Now(), progress=False)
    with pytest.raises(ValueError, match="holds other things than a sweep"):
        sweep(TINY, tmp_path, executor=Now(), progress=False)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="grid='half' is unknown; take one of full, quick"):
        sweep("half", tmp_path / "new", progress=False)
    with pytest.raises(ValueError, match="jobs=0: 1 or more"):
        sweep(TINY, tmp_path / "new", jobs=0, progress=False)
    with pytest.raises(ValueError, match="only without an executor"):
        sweep(TINY, tmp_path / "new", jobs=2, executor=Now(), progress=False)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="holds no sweep"):
        load_sweep(tmp_path / "new")


def test_no_scheduler(tmp_path):
    pytest.importorskip("distributed")
    with pytest.raises(ValueError, match="no scheduler answers"), dask_executor("nowhere"):
        pass
