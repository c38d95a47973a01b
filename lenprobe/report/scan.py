"""A scan on disk: its table as parquet and CSV, and a page to look through."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenprobe.plots import plot_heatmap
from lenprobe.probes.scan import Scan
from lenprobe.reading import read
from lenprobe.report import Block, Section, Table, Views, picture_of, write
from lenprobe.scan_tokens import contents_for
from lenprobe.views import MAX_TOKENS, AttentionView, attention_view

if TYPE_CHECKING:
    import pandas as pd

PAGE, PARQUET, CSV = "scan.html", "scan.parquet", "scan.csv"
"""What ``write_scan`` puts in its folder."""

_SHOWN = 6  # heads whose attention is drawn
_MAPS = {
    "near_weight": "attention at the head's best near offset",
    "positional": "share of the logits' variance that positions decide",
    "alignment": "phase alignment at the rule's offset",
}
_TABLE = (
    "rule",
    "number",
    "share",
    "weight",
    "relative",
    "absolute",
    "content",
    "spread",
    "peak",
    "alignment",
    "horizon",
    "near",
    "near_weight",
)


def write_scan(scan: Scan, folder: str | Path, *, model: Any = None) -> Path:
    """Writes ``scan.parquet``, ``scan.csv`` and ``scan.html``; returns the page's path.

    Args:
        scan: a finished scan, or an interrupted one.
        folder: made if missing.
        model: the model scanned, for views of its most positional heads; none without it.

    Raises:
        NotADirectoryError: ``folder`` is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out={str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    frame = scan.to_frame()
    frame.to_parquet(folder / PARQUET, index=False)
    frame.to_csv(folder / CSV, index=False)
    title = f"Heads of {scan.provenance.model}"
    sections = [_heads(scan, kind, frame) for kind in dict.fromkeys(scan.tokens)]
    if model is not None:
        sections.insert(0, _attention(scan, model))
    if scan.failures:
        rows = [[layer, reason] for layer, reason in scan.failures.items()]
        failed = Table(columns=["layer", "why"], rows=rows, prose=True)
        sections.append(Section(title="Layers that could not be verified", blocks=[failed]))
    return write(folder / PAGE, title, scan.summary(), sections, footer=str(scan.provenance))


def _heads(scan: Scan, kind: str, frame: "pd.DataFrame") -> Section:
    own = frame[frame["tokens"] == kind]
    alphas = [name for name in scan.columns if name.startswith("alpha")]
    swaps = [name for name in scan.columns if name.startswith("swap")]
    shown = [*_TABLE, *alphas, *swaps]
    rows = [
        [f"L{row['layer']}H{row['head']}", *(_cell(row[name]) for name in shown)]
        for row in own.sort_values("near_weight", ascending=False).to_dict("records")
    ]
    blocks: list[Block] = [_map(scan, kind, name, label) for name, label in _MAPS.items()]
    blocks += [_map(scan, kind, name, f"α at N = {name.split()[1]}") for name in alphas[-1:]]
    blocks.append(Table(columns=["head", *shown], rows=rows, sortable=True))
    said = {
        "random": "Uniform random tokens: what positions do by themselves.",
        "text": "Natural text: what the heads do at work.",
        "given": "The tokens given.",
    }
    return Section(title=f"Heads on {kind} tokens", text=[said[kind]], blocks=blocks)


def _map(scan: Scan, kind: str, column: str, label: str) -> Any:
    from matplotlib.figure import Figure

    values = scan.grid(column, kind)
    height = min(9.0, 1.2 + 0.22 * values.shape[0])
    figure = Figure(figsize=(6.8, height), layout="constrained")
    ax = figure.subplots()
    plot_heatmap(values, row_label="layer", column_label="head", value_label=label, ax=ax)
    return picture_of(figure, alt=f"{label}, by layer and head", caption=f"{label}.")


def _attention(scan: Scan, model: Any) -> Section:
    from lenprobe.hosts import host_of

    host = host_of(model)
    length = min(MAX_TOKENS, host.n_ctx, 48)
    sources = contents_for(host, None, None, length=length, batch=2, seed=0)
    tokens = sources.get("text", sources["random"])[:1]
    words = _words(getattr(host.model, "tokenizer", None), tokens)
    views: list[tuple[str, AttentionView]] = []
    for row in scan.most_positional(_SHOWN).itertuples():
        pattern = read(model, tokens, int(row.layer), [int(row.head)]).pattern[0]
        name = f"L{row.layer}H{row.head}: offset {row.near}, {row.near_weight:.0%}"
        views.append((name, attention_view(pattern.float(), words)))
    said = "The heads with the most attention at one near offset, on one sequence."
    return Section(title="Most positional heads", text=[said], blocks=[Views(views=views)])


def _words(tokenizer: Any, tokens: torch.Tensor) -> list[str]:
    ids = tokens[0].tolist()
    return [str(token) if tokenizer is None else tokenizer.decode([token]) for token in ids]


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.0f}" if value == int(value) and abs(value) > 1 else f"{value:.3f}"
