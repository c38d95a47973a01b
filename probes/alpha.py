"""How far will a positional rule carry, before any network is trained: α_L.

An encoding makes kernels ``s_θ(i, j) = ⟨θ, φ(i, j)⟩``. θ is fitted on the grid of length L and
shorter: it minimises the mean cross-entropy of the causal softmax against the task's source map τ,
plus ``λ/2 ‖θ‖²``. That is convex, so θ is one answer, and then

    α_L(N) = share of the new queries up to length N whose unique argmax is τ,

new being ``i ≥ L``, or all queries at length N where the rule changes with the length. A tie is a
miss. The square loss gives other values, so loss, λ, grids and tie rule are part of the result.

On a real head the same share is read with the head's positional kernel (its logits averaged over
contents) in place of s_θ.

The claim tested is that of "A Positional Realizability Theory of Length Generalization in
Single-Head Attention" (Han, Chai, Wang). Definition: ours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.convex import grid, minimise
from lenprobe.encodings.classes import encoding_class
from lenprobe.encodings.features import FeatureMap, PairFunction
from lenprobe.hosts import Host, host_of
from lenprobe.nulls import reinitialised
from lenprobe.reading import (
    check_head,
    check_layer,
    check_tokens,
    known_train_length,
    provenance,
    random_tokens,
    read,
)
from lenprobe.realize import (
    TIE,
    Rule,
    best_rule,
    chance,
    check_lengths,
    check_rule,
    judge_new,
    judge_short,
    short_lengths,
)
from lenprobe.results import Provenance, Result
from lenprobe.tasks import AbsoluteSlot, FixedOffset

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PENALTY = 1e-3
"""λ of the fit."""

_TIES = f"a miss; tied within {TIE:g} of a row's range"


@dataclass(frozen=True, kw_only=True, eq=False)
class Alpha(Result):
    """α_L of one rule, by an encoding class or by a real head."""

    task: str
    encoding: str
    """Of the class; the head's own for a real head."""
    train_length: int
    """L: queries below it are not new."""
    lengths: Int[np.ndarray, " length"]
    """N, each judged apart."""
    shares: Float[np.ndarray, "draw length"]
    """α_L(N) of each draw: a random table for learned positions, else one."""
    margins: Float[np.ndarray, "draw length"]
    """Smallest s(τ) − max of the other keys over the new queries, in logits."""
    fit_accuracy: Float[np.ndarray, " draw"]
    """Share of the short grid's queries whose unique argmax is τ: is the rule realisable at all.

    Where training starts at any position, the grid starts at each of them."""
    fit_loss: Float[np.ndarray, " draw"]
    """Mean cross-entropy on the short grid, in nats."""
    chance: Float[np.ndarray, " length"]
    """The share that source maps drawn uniformly among the visible keys would give."""
    random_head: Float[np.ndarray, " null"]
    """The same head at random initialisation; empty for an encoding class."""

    @property
    def alpha(self) -> Float[np.ndarray, " length"]:
        """α_L(N), the mean over draws."""
        return np.asarray(self.shares.mean(axis=0))

    @property
    def spread(self) -> Float[np.ndarray, " length"]:
        """Standard deviation over draws; 0 where there is one."""
        return np.asarray(self.shares.std(axis=0, ddof=1 if len(self.shares) > 1 else 0))

    @property
    def value(self) -> float:
        """The mean over draws and lengths."""
        return float(self.shares.mean())

    @property
    def realizable(self) -> bool:
        """Whether every draw fits every query of the short grid."""
        return bool((self.fit_accuracy == 1.0).all())

    def summary(self) -> str:
        """α by length, fit, and the nulls."""
        by_length = ", ".join(
            f"{share:.2f} at {length}"
            for length, share in zip(self.lengths, self.alpha, strict=True)
        )
        spread = f" (± {self.spread.max():.2f} over {len(self.shares)} tables)"
        null = f", random head {self.random_head.mean():.2f}" if self.random_head.size else ""
        return (
            f"α of {self.encoding} on {self.task}: {self.value:.2f}; {by_length}"
            f"{spread if len(self.shares) > 1 else ''}\n"
            f"fit at n ≤ {self.train_length}: accuracy {self.fit_accuracy.mean():.2f}, "
            f"cross-entropy {self.fit_loss.mean():.3f} nats; "
            f"smallest margin beyond {self.margins.min():.2g} logits\n"
            f"nulls: shuffled source map {self.chance.mean():.2f}{null}"
        )

    def to_frame(self) -> "pd.DataFrame":
        """One row a draw and length."""
        import pandas as pd

        draw, length = np.indices(self.shares.shape).reshape(2, -1)
        return pd.DataFrame(
            {
                "task": self.task,
                "encoding": self.encoding,
                "train_length": self.train_length,
                "length": self.lengths[length],
                "draw": draw,
                "alpha": self.shares.ravel(),
                "margin": self.margins.ravel(),
                "fit_accuracy": self.fit_accuracy[draw],
                "fit_loss": self.fit_loss[draw],
                "chance": self.chance[length],
            }
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """α by length, with its chance."""
        from lenprobe.plots import plot_accuracy

        curves = {f"{self.encoding} on {self.task}": (self.lengths, self.alpha)}
        curves["shuffled source map"] = (self.lengths, self.chance)
        ax = plot_accuracy(curves, train_length=self.train_length, ax=ax)
        ax.set_ylabel("α: new queries whose argmax is right")
        return ax


# --- by an encoding class -----------------------------------------------------------------------


def alpha(
    task: Rule,
    encoding: "str | FeatureMap | Sequence[FeatureMap] | PairFunction",
    train_length: int = 16,
    lengths: Iterable[int] = (32, 48, 64),
    *,
    fit_lengths: Iterable[int] | None = None,
    penalty: float = PENALTY,
    start: Float[np.ndarray, " feature"] | None = None,
    **settings: Any,
) -> Alpha:
    """α_L of a task under an encoding, with no training of a network.

    >>> from lenprobe.tasks import FixedOffset
    >>> float(alpha(FixedOffset(3), "rope").value)
    1.0
    >>> distance = alpha(FixedOffset(3), lambda i, j: (i - j == 3)[:, None])  # your own φ(i, j)
    >>> distance.alpha.tolist()
    [1.0, 1.0, 1.0]

    Args:
        task: the rule, by its source map.
        encoding: a name of ``lenprobe.encodings.classes.CLASSES``, a function φ of the queries and
            keys of pairs ([pair] each) that returns features [pair, feature], or feature maps.
        train_length: L, in tokens.
        lengths: N > L, in tokens; several, since one can mislead.
        fit_lengths: lengths of the short grid; all from the task's shortest up to L by default.
        penalty: λ > 0.
        start: θ at which the fit starts; 0 by default. The answer does not depend on it.
        settings: what :func:`lenprobe.encodings.classes.encoding_class` takes: d_model, d_head,
            rotary_base, draws, scale, untrained_scale, seed.

    Raises:
        ValueError: a length N ≤ L, a task that has no query at a length or whose answer depends
            on the content, an unknown encoding, or features of a wrong shape.
    """
    check_rule(task)
    measured = check_lengths(task, train_length, lengths)
    fitted = short_lengths(task, train_length, fit_lengths)
    longest = int(measured.max())
    classes = encoding_class(encoding, train_length=train_length, longest=longest, **settings)
    shifts = range(longest - fitted[-1] + 1) if classes[0].every_row_trained else range(1)
    short = grid(task, fitted, shifts)
    kernels, losses = [], []
    for each in classes:
        design = each.features(*short.pairs())
        fit = minimise(design, short, penalty, nonnegative=each.nonnegative, start=start)
        kernels.append(each.kernel(fit.theta, longest))
        losses.append(fit.cross_entropy)
    return Alpha(
        provenance=Provenance(
            verb="alpha",
            model=f"encoding class {classes[0].name}, no model",
            settings={
                "loss": "mean cross-entropy of the causal softmax + λ/2 ‖θ‖²",
                "penalty": penalty,
                "fit_lengths": fitted,
                "tie": _TIES,
                **settings,
            },
        ),
        encoding=classes[0].name,
        fit_loss=np.array(losses),
        random_head=np.zeros(0),
        **_verdicts(kernels, task, fitted, measured, train_length, shifts),
    )


def _verdicts(
    kernels: list[np.ndarray],
    rule: Rule,
    fitted: list[int],
    measured: np.ndarray,
    train_length: int,
    shifts: Iterable[int] = (0,),
) -> dict[str, Any]:
    """The fields that a class and a real head share."""
    beyond = [
        [judge_new(kernel, rule, n, train_length) for n in measured.tolist()] for kernel in kernels
    ]
    return {
        "task": rule.name,
        "train_length": train_length,
        "lengths": measured,
        "shares": np.array([[verdict.share for verdict in draw] for draw in beyond]),
        "margins": np.array([[verdict.margin.min() for verdict in draw] for draw in beyond]),
        "fit_accuracy": np.array(
            [judge_short(kernel, rule, fitted, shifts).share for kernel in kernels]
        ),
        "chance": np.array([chance(rule, n, train_length) for n in measured.tolist()]),
    }


# --- by a real head -----------------------------------------------------------------------------


def alpha_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    task: Rule | None = None,
    train_length: int | None = None,
    lengths: Iterable[int] | None = None,
    fit_lengths: Iterable[int] | None = None,
    seed: int = 0,
) -> Alpha:
    """α_L of a real head: its positional kernel in place of s_θ.

    >>> from lenprobe.models import build
    >>> found = alpha_of(build("rope"), 0, 0, task=FixedOffset(2), train_length=8, lengths=[16])
    >>> found.lengths.tolist()
    [16]

    Args:
        model: any model that ``lenprobe.reading.host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: int64 [batch, pos] over which the kernel is averaged, at least as long as the
            longest N; random ones by default.
        task: the rule, by its source map. By default the fixed offset or absolute slot that most
            queries of the short grid follow; ``fit_accuracy`` says how well.
        train_length: L; the length trained on where the model knows it, else it must be given.
        lengths: N > L; 2, 3 and 4 times L by default, as far as the model reaches.
        fit_lengths: lengths of the short grid.
        seed: of the random tokens and of the random head.

    Raises:
        ValueError, TypeError: bad layer, head, tokens or lengths, or a task with no query there.
    """
    host = host_of(model)
    layer, head = check_layer(host, layer), check_head(host, head)
    train_length = known_train_length(host, train_length)
    wanted = _reachable(host, train_length) if lengths is None else list(lengths)
    tokens = _long_enough(host, tokens, max(wanted, default=2), seed)
    reading = read(model, tokens, layer, [head])
    kernel = positional_kernel(reading.logits[:, 0])
    rule = _read_off(kernel, train_length) if task is None else task
    check_rule(rule)
    measured = check_lengths(rule, train_length, wanted)
    fitted = short_lengths(rule, train_length, fit_lengths)
    with reinitialised(host, seed=seed, up_to_layer=layer):
        blank = positional_kernel(read(model, tokens, layer, [head]).logits[:, 0])
    settings = {
        "source map": "given" if task is not None else "read off the short grid",
        "fit_lengths": fitted,
        "tie": _TIES,
    }
    return Alpha(
        provenance=provenance("alpha_of", host, reading, tokens, seed=seed, **settings),
        encoding=f"{host.positions} head",
        fit_loss=np.array([grid(rule, fitted).cross_entropy(kernel)]),
        random_head=_verdicts([blank], rule, fitted, measured, train_length)["shares"][0],
        **_verdicts([kernel], rule, fitted, measured, train_length),
    )


def positional_kernel(
    logits: Float[Tensor, "batch query key"],
) -> Float[np.ndarray, "query key"]:
    """The mean over contents of row-centred logits; −inf where a query sees no key.

    >>> positional_kernel(torch.tensor([[[1.0, -torch.inf], [3.0, 5.0]]]))[1].tolist()
    [-1.0, 1.0]
    """
    seen = torch.isfinite(logits[0])
    mean = logits.double().mean(dim=0).masked_fill(~seen, 0.0)
    centre = mean.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp(min=1)
    return (mean - centre).masked_fill(~seen, -torch.inf).cpu().numpy()


def _read_off(kernel: np.ndarray, train_length: int) -> Rule:
    kind, number, _ = best_rule(kernel, train_length)
    return FixedOffset(number) if kind == "offset" else AbsoluteSlot(number)


def _reachable(host: Host, train_length: int) -> list[int]:
    found = [times * train_length for times in (2, 3, 4) if times * train_length <= host.n_ctx]
    if not found:
        raise ValueError(
            f"{host.description} takes at most n_ctx={host.n_ctx} positions, less than twice "
            f"train_length={train_length}; give lengths in {train_length + 1}..{host.n_ctx}"
        )
    return found


def _long_enough(host: Host, tokens: Tensor | None, longest: int, seed: int) -> Tensor:
    if tokens is None:
        tokens = random_tokens(host.d_vocab, max(8, 16384 // longest), longest, seed)
    tokens = check_tokens(host, tokens)
    if tokens.shape[1] < longest:
        raise ValueError(
            f"tokens has {tokens.shape[1]} positions, but lengths ask for {longest}; pass longer "
            f"sequences or lengths up to {tokens.shape[1]}"
        )
    return tokens
