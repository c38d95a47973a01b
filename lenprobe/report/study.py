"""What the study's page says: the claims table, and a section for what each was judged on."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lenprobe.claims.base import FAR, TRAIN_LENGTH
from lenprobe.claims.heads import LENGTHS
from lenprobe.claims.theory import rho_range
from lenprobe.plots import plot_accuracy, plot_alpha_quality
from lenprobe.report import Block, Commands, Picture, Section, Table, picture_of, write
from lenprobe.results import versions
from lenprobe.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "rope": "RoPE",
    "learned": "learned absolute",
    "learned_offset": "learned, random offsets",
}


def write_study(study: Study, path: Path) -> Path:
    """Writes the study's report; returns its path."""
    holds = [claim.name for claim in study.claims if claim.holds]
    fails = [claim.name for claim in study.claims if claim.holds is False]
    lead = (
        f"{len(holds)} of {len(holds) + len(fails)} scored claims hold"
        + (f"; {', '.join(fails)} do not" if fails else "")
        + f". {study.sweep.grid.models:,} models of the grid and "
        f"{len(study.heads.models) + len(study.deep)} others were trained at up to "
        f"{TRAIN_LENGTH} tokens and measured beyond."
    )
    title = "What position encodings carry to new lengths"
    return write(path, title, lead, list(_sections(study)), footer=_footer())


def _sections(study: Study) -> Iterator[Section]:
    yield Section(
        title="Claims",
        text=["No threshold was moved, and what does not hold is said so."],
        blocks=[
            Table(
                columns=["", "claim", "measured", "holds when", "verdict"],
                rows=[
                    [claim.name, claim.text, claim.figure, claim.threshold, claim.verdict]
                    for claim in study.claims
                ],
                prose=True,
            )
        ],
    )
    yield _accuracy(study)
    yield _carriers(study)
    yield _dilution(study)
    yield _pinning(study)
    yield _alpha(study)
    yield _prediction(study)
    yield _content(study)
    yield Section(
        title="How to make this page",
        blocks=[Commands(lines=["lenprobe study --out DIR", "lenprobe study --out DIR --quick"])],
    )


def _accuracy(study: Study) -> Section:
    heads, curves, rows = study.heads, {}, []
    for encoding, title in TITLES.items():
        found = [heads.accuracy[key] for key, _ in heads.of(encoding)]
        lengths = found[0].lengths
        values = np.array([each.last_query for each in found])
        curves[title] = (lengths, np.median(values, axis=0))
        cells = [
            f"{np.median(column):.3f} ({column.min():.2f} to {column.max():.2f})"
            for column in values.T
        ]
        rows.append([title, *cells, *["–"] * (len(LENGTHS) - len(cells))])
    figure, ax = _figure()
    plot_accuracy(curves, train_length=TRAIN_LENGTH, chance=1 / 16, ax=ax)
    return Section(
        title="Accuracy by length (C1, C13)",
        text=[
            f"One-head models, offsets {', '.join(map(str, heads.effort.offsets))}, "
            f"{heads.effort.seeds} seeds each: accuracy at the last query, the median over all "
            "of an encoding's heads."
        ],
        blocks=[
            picture_of(figure, alt="Accuracy at the last query against sequence length"),
            Table(
                columns=["median (least to most)", *(str(n) for n in LENGTHS)],
                rows=rows,
                caption="Accuracy by sequence length, in tokens.",
            ),
        ],
    )


def _carriers(study: Study) -> Section:
    blocks = [
        _drawn(
            found.plot,
            alt=f"Carrier of offset {offset}",
            caption=f"Offset {offset}, seed {seed}: peak {found.peak} among trained offsets, "
            f"alignment {found.alignment:.2f}, correlation with the measured carrier "
            f"{found.correlation:.5f}, horizon {found.horizon:.0f}.",
        )
        for (_, offset, seed), found in study.heads.carriers.items()
        if seed == 0
    ]
    return Section(
        title="Carriers (C4)",
        text=["The content-averaged logit of a RoPE head by offset, in closed form and measured."],
        blocks=blocks,
    )


def _dilution(study: Study) -> Section:
    blocks = [
        _drawn(
            found.plot,
            alt=f"Dilution at offset {offset}",
            caption=f"Offset {offset}, seed {seed}: lines are forecast, marks measured.",
        )
        for (_, offset, seed), found in study.heads.dilutions.items()
        if seed == 0
    ]
    return Section(
        title="Dilution and forecast (C5)",
        text=[
            "Target mass and accuracy by length. The forecast draws contents and reads the answer "
            "off the carrier; the model is not run."
        ],
        blocks=blocks,
    )


def _pinning(study: Study) -> Section:
    blocks = []
    for encoding in ("learned", "learned_offset"):
        key = next(key for key in study.heads.pinnings if key[0] == encoding)
        found = study.heads.pinnings[key]
        blocks.append(
            _drawn(
                found.plot,
                alt=f"Where {TITLES[encoding]} attends beyond the trained positions",
                caption=f"{TITLES[encoding]}, offset {key[1]}, seed {key[2]}: {found.summary()}",
            )
        )
    return Section(
        title="Pinning (C3)",
        text=[
            f"For queries from position {TRAIN_LENGTH} on: which absolute key has the most weight. "
            "Trained at random offsets, every row is trained, and there is nothing to pin to."
        ],
        blocks=blocks,
    )


def _alpha(study: Study) -> Section:
    alphas = study.theory.alphas
    return Section(
        title="α by task and encoding (C11)",
        text=[
            "How much of each rule an encoding carries beyond the training length, computed "
            "without training a network."
        ],
        blocks=[
            _drawn(alphas.plot, alt="α by task and encoding", caption="", size=(8.4, 3.8)),
            Table(
                columns=["task", *alphas.encodings],
                rows=[
                    [name, *(f"{value:.2f}" for value in row)]
                    for name, row in zip(alphas.tasks, alphas.value, strict=True)
                ],
            ),
        ],
    )


def _prediction(study: Study) -> Section:
    theory = study.theory
    blocks: list[Block] = []
    for architecture in theory.grid.architectures:
        accuracy, rule = theory.rho(architecture)
        pairs = theory.pairs(architecture)

        def draw(ax: "Axes", pairs: Any = pairs) -> None:
            plot_alpha_quality(
                pairs["alpha"].to_numpy(),
                pairs["accuracy"].to_numpy(),
                [*pairs["encoding"]],
                chance=1 / 16,
                ax=ax,
            )

        blocks.append(
            _drawn(
                draw,
                alt=f"α against accuracy, {architecture}",
                caption=f"{architecture}: one mark a task and encoding, mean over seeds and "
                f"lengths. AUC {theory.auc('accuracy', architecture):.2f} by accuracy, "
                f"{theory.auc('rule_share', architecture):.2f} by right argmaxes; Spearman over "
                f"runs {accuracy:.2f} and {rule:.2f}.",
            )
        )
    return Section(
        title="α against trained models (C8, C9, C10)",
        text=[
            f"Every model of the grid was measured at {', '.join(map(str, theory.grid.lengths))} "
            f"tokens. {study.sweep.fitted:,} of {theory.grid.models:,} learned their task at "
            f"{TRAIN_LENGTH}; the others are kept. {rho_range(theory)}."
        ],
        blocks=blocks,
    )


def _content(study: Study) -> Section:
    rows = [
        [row.task, row.architecture, f"{row.near:.2f}", f"{row.far:.2f}"]
        for row in study.theory.content.itertuples()
    ]
    return Section(
        title="Out of scope (C12)",
        text=["Where the answer stands depends on the content, so α says nothing; RoPE models."],
        blocks=[
            Table(
                columns=["task", "architecture", f"accuracy at {TRAIN_LENGTH}", f"at {FAR}"],
                rows=rows,
            )
        ],
    )


def _drawn(draw: Any, *, alt: str, caption: str, size: tuple[float, float] = (6.4, 3.6)) -> Picture:
    figure, ax = _figure(size)
    draw(ax)
    return picture_of(figure, alt=alt, caption=caption)


def _figure(size: tuple[float, float] = (6.4, 3.6)) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _footer() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())
