"""C8 to C12: does α_L, computed without training, predict the grid of trained models.

A run is one trained model; its figures are means over the lengths beyond L. A pair is a task with
an encoding, and α_L belongs to the pair: no architecture enters it. Quality is read twice: as
accuracy on new queries, of which what guessing gives is taken off, and as the share of new queries
whose unique argmax of the best head's positional kernel is the right key.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from lenprobe.alpha_table import AlphaTable, alpha_table, named_task, positional_task
from lenprobe.claims.base import FAR, TRAIN_LENGTH, Claim, span
from lenprobe.content_tasks import ContentTask
from lenprobe.grid import Grid, shape_of
from lenprobe.models import build
from lenprobe.probes.alpha import alpha
from lenprobe.stacking import fit_many
from lenprobe.tasks import AbsoluteSlot
from lenprobe.training import accuracy_by_length

if TYPE_CHECKING:
    import pandas as pd

GENERALISES = 0.6
"""Mean accuracy of a pair's runs beyond L from which it counts as generalising."""
LOW_ALPHA = 0.15
"""α_L up to which the theory says that a pair does not generalise."""
CONTENT = ("induction", "sort", "addition")
SCALES = (0.5, 1.0, 2.0)
"""Of the untrained rows of a learned table, over the trained ones' initial scale."""
_CONTENT_SEEDS, _CONTENT_STEPS = 2, 1000


def runs_of(frame: "pd.DataFrame", alphas: AlphaTable) -> "pd.DataFrame":
    """One row a trained model, with its pair's α_L, fit accuracy, and quality above chance."""
    keys = ["architecture", "task", "encoding", "seed"]
    means = ["accuracy", "rule_share", "content_share", "fit_accuracy"]
    runs = frame.groupby(keys, sort=False)[means].mean().reset_index()
    index = {name: row for row, name in enumerate(alphas.tasks)}
    column = {name: position for position, name in enumerate(alphas.encodings)}
    at = [
        (index[positional_task(task).name], column[encoding])
        for task, encoding in zip(runs["task"], runs["encoding"], strict=True)
    ]
    chances = {task: 1 / positional_task(task).d_vocab for task in runs["task"].unique()}
    runs["alpha"] = [alphas.value[where] for where in at]
    runs["realizable"] = [alphas.fit_accuracy[where] for where in at]
    runs["above_chance"] = (runs["accuracy"] - runs["task"].map(chances)).clip(lower=0)
    return runs


def auc(score: Float[np.ndarray, " pair"], positive: Bool[np.ndarray, " pair"]) -> float:
    """Chance that a positive scores above a negative, ties counting one half; NaN without both.

    >>> auc(np.array([0.9, 0.8, 0.1]), np.array([True, False, False]))
    1.0
    """
    from scipy import stats

    if positive.all() or not positive.any():
        return float("nan")
    statistic = stats.mannwhitneyu(score[positive], score[~positive]).statistic
    return float(statistic / (positive.sum() * (~positive).sum()))


def spearman(runs: "pd.DataFrame", quality: str) -> float:
    """Rank correlation of α_L with a quality over runs; runs that could not be read left out."""
    from scipy import stats

    seen = runs[quality].notna()
    return float(stats.spearmanr(runs.loc[seen, "alpha"], runs.loc[seen, quality]).statistic)


def above_floor(runs: "pd.DataFrame", quality: str) -> "pd.DataFrame":
    """The runs with a quality counted from what models that know no positions reach at most.

    Their attention is all but uniform, which answers better than chance, and better than attention
    to a wrong key does: below that floor a quality says nothing of a rule.
    """
    blind = runs[runs["encoding"] == "none"]
    floor = blind.groupby(["architecture", "task"])[quality].max()
    keys = zip(runs["architecture"], runs["task"], strict=True)
    return runs.assign(**{quality: (runs[quality] - [floor[key] for key in keys]).clip(lower=0)})


def ceiling(values: Float[np.ndarray, " run"]) -> float:
    """The most that a rank correlation with these values can be for a quality without ties.

    >>> ceiling(np.array([0.0, 1.0, 2.0])), round(ceiling(np.array([0.0, 0.0, 1.0])), 3)
    (1.0, 0.866)
    """
    _, counts = np.unique(values, return_counts=True)
    n = len(values)
    return float(np.sqrt(1 - (counts**3.0 - counts).sum() / (n**3.0 - n)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Theory:
    """α_L beside the runs of a grid."""

    grid: Grid
    alphas: AlphaTable
    """Of the grid's pairs."""
    runs: "pd.DataFrame"
    scales: dict[float, float]
    """α_L of learned positions on a slot inside the range, by the scale of the untrained rows."""
    content: "pd.DataFrame"
    """Accuracy on tasks whose answers depend on the content, one row a cell."""

    def pairs(self, architecture: str) -> "pd.DataFrame":
        """Means over seeds, one row a pair."""
        own = self.runs[self.runs["architecture"] == architecture]
        return own.groupby(["task", "encoding"], sort=False).mean(numeric_only=True).reset_index()

    def auc(self, quality: str, architecture: str = "1L1H", *, score: str = "alpha") -> float:
        """Of α_L over the pairs that generalise by a quality and those that do not."""
        pairs = self.pairs(architecture)
        return auc(pairs[score].to_numpy(), (pairs[quality] >= GENERALISES).to_numpy())

    def rho(self, architecture: str) -> tuple[float, float]:
        """Spearman of α_L with accuracy above chance, and with the share of right argmaxes."""
        own = self.runs[self.runs["architecture"] == architecture]
        return spearman(own, "above_chance"), spearman(own, "rule_share")


def theory_of(frame: "pd.DataFrame", grid: Grid, *, progress: bool = False) -> Theory:
    """Computes α_L of the grid's pairs and sets it beside the runs."""
    alphas = alpha_table(
        grid.tasks, grid.encodings, grid.train_length, grid.lengths, progress=progress
    )
    slot = AbsoluteSlot(2)
    scales = {
        scale: alpha(slot, "learned", grid.train_length, grid.lengths, untrained_scale=scale).value
        for scale in SCALES
    }
    content = _content_runs(grid, progress=progress)
    runs = runs_of(frame, alphas)
    return Theory(grid=grid, alphas=alphas, runs=runs, scales=scales, content=content)


def _content_runs(grid: Grid, *, progress: bool) -> "pd.DataFrame":
    import pandas as pd

    rows = []
    for name in CONTENT:
        task = named_task(name)
        assert isinstance(task, ContentTask)  # CONTENT names no others
        for architecture in (grid.architectures[0], "2L4H"):
            layers, heads = shape_of(architecture)
            shape: dict[str, Any] = {"n_layers": layers, "n_heads": heads, "n_ctx": FAR}
            models = [build("rope", seed=seed, **shape) for seed in range(_CONTENT_SEEDS)]
            lengths = range(max(4, task.min_length), TRAIN_LENGTH + 1)
            fit_many(models, task, lengths, _CONTENT_STEPS, progress=progress)
            found = [accuracy_by_length(m, task, [TRAIN_LENGTH, FAR]) for m in models]
            near, far = (float(np.mean([f.all_queries[i] for f in found])) for i in (0, 1))
            rows.append({"task": name, "architecture": architecture, "near": near, "far": far})
    return pd.DataFrame(rows)


def separation(theory: Theory) -> Claim:
    """C8."""
    pairs = theory.pairs("1L1H")
    generalises = pairs["accuracy"] >= GENERALISES
    found = theory.auc("accuracy")
    by_rule = theory.auc("rule_share")
    low, high = pairs.loc[generalises, "alpha"], pairs.loc[~generalises, "alpha"]
    above = pairs[~generalises & (pairs["alpha"] >= low.min())]
    between = ", ".join(
        f"{row.task} × {row.encoding} (α {row.alpha:.2f}, accuracy {row.accuracy:.2f}, right "
        f"argmaxes {row.rule_share:.2f})"
        for row in above.itertuples()
    )
    return Claim(
        name="C8",
        text="α_L, computed without training, separates the pairs that generalise",
        figure=(
            f"AUC {found:.3f} by accuracy ≥ {GENERALISES} ({generalises.sum()} of {len(pairs)} "
            f"pairs), {by_rule:.3f} by right argmaxes; lowest α of a pair that generalises "
            f"{low.min():.2f}, highest of the others {high.max():.2f}"
            + (f"; not below: {between}" if between else "")
        ),
        threshold="AUC 1.0 over the one-layer, one-head pairs, by accuracy",
        holds=found == 1.0,
    )


def ranking(theory: Theory) -> Claim:
    """C9."""
    accuracy, rule = theory.rho("1L1H")
    own = theory.runs[theory.runs["architecture"] == "1L1H"]
    said = (
        f"Spearman over {len(own)} runs: {accuracy:.2f} with accuracy above chance, {rule:.2f} "
        f"with right argmaxes"
    )
    low = own["alpha"] <= LOW_ALPHA
    if "none" in theory.grid.encodings:
        floored = [spearman(above_floor(own, name), name) for name in ("accuracy", "rule_share")]
        said += (
            f"; counted from what models without positions reach, {floored[0]:.2f} and "
            f"{floored[1]:.2f}"
        )
    tied = own["alpha"].where(~low, 0.0).to_numpy()
    return Claim(
        name="C9",
        text="α_L ranks the quality of trained models",
        figure=(
            f"{said}; {low.mean():.0%} of the runs have α ≤ {LOW_ALPHA}, where quality is at its "
            f"floor and only noise ranks it: with those runs tied in α, no quality without ties "
            f"can reach more than {ceiling(tied):.2f}"
        ),
        threshold="ρ ≥ 0.90 on one of the two, over the runs",
        holds=bool(max(accuracy, rule) >= 0.9),
    )


def loosening(theory: Theory) -> Claim:
    """C10."""
    single = max(theory.rho("1L1H"))
    others = [name for name in theory.grid.architectures if name != "1L1H"]
    best = {name: max(theory.rho(name)) for name in others}
    twins = theory.pairs("1L1H").set_index(["task", "encoding"])["content_share"]
    odd = theory.runs[
        (theory.runs["architecture"] != "1L1H")
        & (theory.runs["alpha"] <= LOW_ALPHA)
        & (theory.runs["accuracy"] >= GENERALISES)
    ]
    differences = [row.content_share - twins[row.task, row.encoding] for row in odd.itertuples()]
    above = sum(difference > 0 for difference in differences)
    rhos = ", ".join(f"{name} {value:.2f}" for name, value in best.items())
    falls = all(value < single for value in best.values())
    which = f"α ≤ {LOW_ALPHA} and accuracy ≥ {GENERALISES}"
    if differences:
        said = (
            f"{above} of {len(odd)} runs with {which} have a content share above their 1L1H twins "
            f"(median difference {np.median(differences):+.2f})"
        )
    else:
        said = f"no run of this grid has {which}, so the second half is untested"
    return Claim(
        name="C10",
        text="with more heads and layers the tie loosens, since content can find the token",
        figure=f"larger of the two ρ: 1L1H {single:.2f}, {rhos}; {said}",
        threshold="ρ below that of 1L1H in every other architecture; all such runs above",
        holds=None if falls and not differences else bool(falls and above == len(differences)),
    )


def by_encoding(theory: Theory) -> Claim:
    """C11."""
    far, kept = ("half-copy", "reversal"), {"train_length": TRAIN_LENGTH}
    names = ("offset:1", "offset:3", "offset:8", "slot:2", *far)
    encodings = ("rope", "t5", "table", "sinusoidal", "learned")
    table = alpha_table(names, encodings, lengths=(32, 64, 128), progress=False, **kept)
    value = {
        (task, encoding): table.value[i, j]
        for i, task in enumerate(names)
        for j, encoding in enumerate(encodings)
    }
    relative = encodings[:3]
    offsets = min(value[task, e] for task in names[:3] for e in relative)
    lost = max(value[task, e] for task in far for e in relative)
    learned = max(value[task, "learned"] for task in (*names[:3], *far))
    slot = value["slot:2", "sinusoidal"]
    by_scale = ", ".join(f"{v:.2f} at scale {scale:g}" for scale, v in theory.scales.items())
    return Claim(
        name="C11",
        text="relative encodings carry a fixed offset, absolute ones an absolute slot",
        figure=(
            f"RoPE, T5, free table: offsets ≥ {offsets:.2f}, half copy and reversal ≤ {lost:.2f}; "
            f"sinusoidal slot {slot:.2f}; learned on offsets, half copy, reversal ≤ {learned:.2f}, "
            f"its slot {by_scale} of the untrained rows"
        ),
        threshold="≥ 0.99, ≤ 0.1; ≥ 0.95; ≤ 0.1; the slot is reported",
        holds=bool(offsets >= 0.99 and lost <= 0.1 and slot >= 0.95 and learned <= 0.1),
    )


def out_of_scope(theory: Theory) -> Claim:
    """C12."""
    rows = theory.content.itertuples()
    figure = "; ".join(
        f"{row.task} {row.architecture} {row.near:.2f} at {TRAIN_LENGTH}, {row.far:.2f} at {FAR}"
        for row in rows
    )
    return Claim(
        name="C12",
        text="tasks whose answer depends on content are outside the theory",
        figure=f"RoPE, accuracy over all queries: {figure}",
        threshold="reported, not scored",
        holds=None,
    )


def rho_range(theory: Theory) -> str:
    """Both correlations of every architecture, for a caption."""
    return "; ".join(
        f"{name}: ρ {span(theory.rho(name), 2)}, AUC {theory.auc('accuracy', name):.2f}"
        for name in theory.grid.architectures
    )
