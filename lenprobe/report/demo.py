"""What the demo's page says: its sections, put together from a finished demo."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lenprobe.demo import TITLES, Demo, DemoHead, table_of, view_lengths
from lenprobe.plots import plot_accuracy, plot_singular_values
from lenprobe.report import Commands, Picture, Section, Table, Views, picture_of, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_demo(demo: Demo, path: Path) -> Path:
    """Writes the demo's report; returns its path."""
    title = f"Two heads, one rule: copy the token {demo.offset} back"
    return write(path, title, _lead(demo), list(_sections(demo)), footer=_footer(demo))


def _lead(demo: Demo) -> str:
    rope, learned = demo.heads["rope"].accuracy, demo.heads["learned"].accuracy
    trained, far = demo.train_length, int(rope.lengths[3])
    return (
        f"A RoPE head and a learned-absolute head were trained on sequences of up to {trained} "
        f"tokens. At {trained} they answer {rope.last_query[0]:.1%} and "
        f"{learned.last_query[0]:.1%} right; at {far}, which neither ever saw, "
        f"{rope.last_query[3]:.1%} and {learned.last_query[3]:.1%} (guessing: {rope.chance:.1%})."
    )


def _sections(demo: Demo) -> Iterator[Section]:
    yield Section(
        title="Summary",
        text=[
            "Each figure is measured on the trained heads; logits were read from the model and "
            "checked against the attention that it used."
        ],
        blocks=[Table(columns=["", *TITLES.values()], rows=table_of(demo.heads))],
    )
    yield _accuracy(demo)
    yield _carriers(demo)
    yield _singular_values(demo)
    yield _equivariance(demo)
    yield _attention(demo)
    yield _provenance(demo)


def _accuracy(demo: Demo) -> Section:
    heads = demo.heads.items()
    curves = {
        TITLES[name]: (head.accuracy.lengths, head.accuracy.last_query) for name, head in heads
    }
    first = next(iter(demo.heads.values())).accuracy
    rows = [[TITLES[name], *(f"{a:.3f}" for a in head.accuracy.last_query)] for name, head in heads]
    figure, ax = _figure()
    plot_accuracy(curves, train_length=demo.train_length, chance=first.chance, ax=ax)
    return Section(
        title="Accuracy by length",
        text=[
            "The last query of each sequence must name the token "
            f"{demo.offset} places back. Lengths in the shaded part were never trained on."
        ],
        blocks=[
            picture_of(figure, alt="Accuracy at the last query against sequence length"),
            Table(
                columns=["sequence length (tokens)", *(str(n) for n in first.lengths)],
                rows=rows,
                caption="Accuracy at the last query.",
            ),
        ],
    )


def _carriers(demo: Demo) -> Section:
    rope, learned = demo.heads["rope"].carrier, demo.heads["learned"].carrier
    if math.isfinite(rope.horizon):
        lobe = (
            f"Its horizon is offset {rope.horizon:.0f}: there a side lobe, which training never "
            "saw, is as high as the target. Up to it only dilution over more keys wears the rule "
            "down; past it the lobe competes."
        )
    else:
        lobe = f"No offset up to {rope.offsets[-1]} reaches the target's height: no horizon so far."
    return Section(
        title="Carriers",
        text=[
            "The carrier g(Δ) is the logit of a key Δ places back, averaged over contents. For "
            "RoPE it is a sum of one cosine a rotary pair, known at every offset; the dots are "
            f"the mean of each diagonal of the logits themselves. {lobe}",
            "The learned-absolute head has no such function: shown is the part of its mean logits "
            f"that depends on the offset alone, over sequences of {len(learned.offsets)} tokens, "
            "most of whose positions were never trained.",
        ],
        blocks=[_carrier(name, head) for name, head in demo.heads.items()],
    )


def _carrier(name: str, head: DemoHead) -> Picture:
    figure, ax = _figure()
    head.carrier.plot(ax)
    agreement = (
        f", correlation of the closed form with the measured one {head.carrier.correlation:.5f}"
        if head.carrier.has_closed_form
        else ""
    )
    return picture_of(
        figure,
        alt=f"Carrier of the {TITLES[name]} head",
        caption=f"{TITLES[name]}: target {head.carrier.target}, peak {head.carrier.peak} among "
        f"the trained offsets{agreement}.",
    )


def _singular_values(demo: Demo) -> Section:
    carriers = {TITLES[name]: head.carrier for name, head in demo.heads.items()}
    figure, ax = _figure()
    plot_singular_values({name: c.singular_values for name, c in carriers.items()}, ax=ax)
    rows = [
        [
            name,
            str(c.rank_95),
            str(c.rank_99),
            f"{c.participation_rank:.2f}",
            f"{c.entropy_rank:.2f}",
        ]
        for name, c in carriers.items()
    ]
    pairs = len(carriers[TITLES["rope"]].amplitudes)
    return Section(
        title="Singular values",
        text=[
            f"Of the carrier matrix G[i, j] = g(i − j). For RoPE with {pairs} pairs its rank is at "
            f"most {2 * pairs + 1}; how few of them carry the energy is the finding. A low rank "
            "alone identifies nothing: a head pinned to one slot has a lower one. It counts "
            "together with the phase alignment."
        ],
        blocks=[
            picture_of(figure, alt="Singular values of both carrier matrices"),
            Table(
                columns=["", "rank at 95 %", "rank at 99 %", "participation", "entropy"], rows=rows
            ),
        ],
    )


def _equivariance(demo: Demo) -> Section:
    tables = (("float64 tables", "errors"), ("the host's tables", "host_errors"))
    dtypes = demo.heads["rope"].equivariance.dtypes
    rows, reach = [], {}
    for name, head in demo.heads.items():
        reach[name] = int(head.equivariance.shifts.max())
        for label, attribute in tables:
            errors = getattr(head.equivariance, attribute)
            if name == "rope" or attribute == "errors":
                row_name = f"{TITLES[name]}, {label}" if name == "rope" else TITLES[name]
                rows.append([row_name, *(f"{errors[dtype]:.1e}" for dtype in dtypes)])
    figure, ax = _figure()
    demo.heads["rope"].equivariance.plot(ax)
    return Section(
        title="Equivariance",
        text=[
            "All positions are shifted by δ and the contents kept: by how much does any logit "
            "change, in units of the logits' standard deviation? A rule of the offset alone "
            "changes none. RoPE keeps it up to rounding, and the rounding of float32 tables "
            "grows with the position; learned-absolute positions do not keep it."
        ],
        blocks=[
            Table(
                columns=["largest error", *dtypes],
                rows=rows,
                caption=f"Over shifts up to {reach['rope']:,} tokens for RoPE, and up to "
                f"{reach['learned']:,}, where its table of positions ends, for learned absolute; "
                "at the head and through the whole model.",
            ),
            picture_of(
                figure,
                alt="Equivariance error of the RoPE head against the shift",
                caption="RoPE, by dtype and by how its rotation tables were computed.",
            ),
        ],
    )


def _attention(demo: Demo) -> Section:
    views = [
        (f"{TITLES[name]}, n = {length}", head.views[length])
        for length in view_lengths(demo.train_length)
        for name, head in demo.heads.items()
    ]
    return Section(
        title="Attention",
        text=[
            "One random sequence, its start and a longer part of it; labels read token (position). "
            "Hover over a cell for its weight. A head that follows its rule shows one diagonal, "
            f"{demo.offset} below the main one."
        ],
        blocks=[Views(views=views, caption="Drawn by circuitsvis.")],
    )


def _provenance(demo: Demo) -> Section:
    versions = demo.as_dict()["versions"]
    readings = [
        [TITLES[name], str(head.steps), str(head.carrier.provenance)]
        for name, head in demo.heads.items()
    ]
    command = (
        f"lenprobe demo --offset {demo.offset} --train-length {demo.train_length} "
        f"--seed {demo.seed} --steps {demo.steps}"
    )
    return Section(
        title="Provenance",
        text=["The command that reproduces this page, up to the order of floating-point sums:"],
        blocks=[
            Commands(lines=[command]),
            Table(columns=["head", "training steps", "reading"], rows=readings),
            Table(columns=["package", "version"], rows=[list(item) for item in versions.items()]),
        ],
    )


def _footer(demo: Demo) -> str:
    return (
        f"lenprobe; trained and measured in {demo.seconds:.0f} s. Definitions are lenprobe's own; "
        "the claims are those of arXiv 2607.18759. This page is one file and loads nothing."
    )


def _figure() -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 3.6), layout="constrained")
    return figure, figure.subplots()
