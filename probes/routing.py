"""How does a head find its key: by where it stands, or by what it holds.

Three independent readings:

1. the **variance shares** of the logits (:mod:`lenprobe.probes.decomposition`);
2. the **swap scores**: the contents of two keys a, b before query i change places and the layer is
   run again. With ``v = (p(i, a), p(i, b))`` before and ``v'`` after, the weight of a uniform row
   subtracted from both, the positional score is ``cos(v', v)`` and the symbolic one
   ``cos(v', flip v)``, averaged with the mass at stake ``|p(i, a) − p(i, b)|`` for weight. (After
   Urrutia et al. 2511.11579, centred: uniform attention would score high on both.) Key a is the one
   the query attends to most, b any other.
3. the **behaviour** on a task: the tokens at the right key and at another change places; does the
   answer go with the position, or with the token that stood there.

A layer's q and k are functions of its input, position by position, so to swap the inputs of a and b
is to swap their unrotated keys, which is exact and needs no second run. Models that add their
positions to the embeddings carry them in that input too: there the tokens are swapped, positions
stay, and the model is run again. Definition: ours.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.hosts import Host
from lenprobe.nulls import HeadReading, read_with_null, reinitialised, shuffled_sources
from lenprobe.probes.decomposition import (
    PARTS,
    bootstrap_weights,
    check_sequences,
    decomposition_from,
)
from lenprobe.reading import LayerReading, provenance, read
from lenprobe.results import Result
from lenprobe.tasks import Task

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PURE = 0.9
"""A swap score from here on counts as found, ..."""
STAKE = 2.0
"""... where the mass at stake is this many times a uniform row's weight: less is no choice."""
_ROUNDS = 4  # swaps a sequence
_ADDED = ("standard", "learned", "learned_offset", "sinusoidal")


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing(Result):
    """Position or content, by three readings."""

    shares: Float[np.ndarray, " part"]
    """Relative, absolute, other positional and content share of the logits' variance."""
    positional_interval: Float[np.ndarray, " bound"]
    """Bootstrap interval of the positional share (the first three)."""
    swap: Float[np.ndarray, " score"]
    """Positional and symbolic score, each in −1..1."""
    swap_intervals: Float[np.ndarray, "score bound"]
    """Bootstrap interval over sequences of each."""
    stake: float
    """Mean mass at stake in a swap, in units of a uniform row's weight."""
    behaviour: Float[np.ndarray, " follows"]
    """Share of answers that follow position, and content; NaN without a task."""
    shuffled_behaviour: Float[np.ndarray, " follows"]
    """The same under a shuffled source map: of keys drawn at random; NaN without a task."""
    null_shares: Float[np.ndarray, " part"]
    """The shares at random initialisation."""
    null_swap: Float[np.ndarray, " score"]
    """The swap scores at random initialisation."""
    null_stake: float
    """The mass at stake at random initialisation."""

    @property
    def positional_share(self) -> float:
        """Share of the variance that positions decide."""
        return float(self.shares[:3].sum())

    @property
    def kind(self) -> str:
        """``position``, ``content`` or ``neither``, by the swap scores."""
        if not self.stake >= STAKE:
            return "neither"
        positional, symbolic = self.swap
        if positional >= PURE > symbolic:
            return "position"
        return "content" if symbolic >= PURE > positional else "neither"

    @property
    def found(self) -> bool:
        """Whether the head is found to route by one of the two."""
        return self.kind != "neither"

    def summary(self) -> str:
        """The three readings."""
        low, high = self.positional_interval
        (p_low, p_high), (s_low, s_high) = self.swap_intervals
        positional, symbolic = self.swap
        lines = [
            f"routes by {self.kind}: positional share {self.positional_share:.2f} "
            f"[{low:.2f}, {high:.2f}] of the variance",
            f"swap scores: positional {positional:.2f} [{p_low:.2f}, {p_high:.2f}], symbolic "
            f"{symbolic:.2f} [{s_low:.2f}, {s_high:.2f}]; at stake {self.stake:.1f} × uniform "
            f"(random head {self.null_stake:.1f})",
        ]
        if np.isfinite(self.behaviour).all():
            position, content = self.behaviour
            shuffled = self.shuffled_behaviour[0]
            lines.append(
                f"answers follow position {position:.0%} (shuffled source map {shuffled:.0%}), "
                f"content {content:.0%}"
            )
        return "\n".join(lines)

    def to_frame(self) -> "pd.DataFrame":
        """One row a figure, with its interval and its value at random initialisation."""
        import pandas as pd

        nan = np.full(2, np.nan)
        rows = [
            *((f"share: {n}", v, *nan, z) for n, v, z in zip(PARTS, self.shares, self.null_shares)),  # noqa: B905
            ("swap: positional", self.swap[0], *self.swap_intervals[0], self.null_swap[0]),
            ("swap: symbolic", self.swap[1], *self.swap_intervals[1], self.null_swap[1]),
            ("behaviour: position", self.behaviour[0], *nan, self.shuffled_behaviour[0]),
            ("behaviour: content", self.behaviour[1], *nan, self.shuffled_behaviour[1]),
        ]
        return pd.DataFrame(rows, columns=["figure", "value", "low", "high", "null"])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The readings as bars, with intervals and the random head's values."""
        from lenprobe.plots import BLUE, GREY, _axes, _tidy

        ax = _axes(ax)
        frame = self.to_frame().dropna(subset="value").iloc[::-1]
        place = np.arange(len(frame))
        ax.barh(place, frame["value"], color=BLUE, height=0.6)
        ax.hlines(place, frame["low"], frame["high"], color="black")
        ax.plot(frame["null"], place, "|", color=GREY, ms=12, label="at random initialisation")
        ax.set_yticks(place, frame["figure"])
        ax.set(xlabel="share or score", xlim=(min(-0.1, float(frame["value"].min()) - 0.05), 1.05))
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8)
        return _tidy(ax)


def routing_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    task: Task | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Routing:
    """Whether one head routes by position or by content.

    >>> from lenprobe.planted import carrier, content_match
    >>> routing_of(carrier(3).model, layer=0, head=0).kind
    'position'
    >>> routing_of(content_match(partner=1).model, layer=0, head=0).kind
    'content'

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: contents, int64 [batch, pos], at least 4 long; uniform random ones by default.
        task: asks for the behaviour too; its last query at the tokens' length is asked.
        confidence: of the bootstrap intervals over sequences, in (0, 1).
        resamples: of the bootstrap.
        seed: of the default tokens, the swaps, the bootstrap and the random head.

    Raises:
        ValueError: bad layer, head or tokens; too few sequences for the interval; a task whose
            vocabulary the model lacks, or with no query at that length.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    both = read_with_null(model, layer, head, tokens, seed=seed, at_least=4)
    return routing_from(both, task=task, confidence=confidence, resamples=resamples)


def routing_from(
    both: HeadReading,
    *,
    task: Task | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Routing:
    """:func:`routing_of` on a head that has been read already."""
    seed = both.seed
    check_sequences(both.tokens.shape[0], confidence)
    if task is not None:
        _check_task(task, both)
    parts = decomposition_from(both, confidence=confidence, resamples=resamples)
    swaps = draw_swaps(both.trained.pattern[:, 0], _ROUNDS, seed)
    trained = _swapped(both.host, both.trained, both.tokens, swaps)
    blank_swaps = draw_swaps(both.random.pattern[:, 0], _ROUNDS, seed)
    with reinitialised(both.host, seed=seed, up_to_layer=both.trained.layer):
        blank = _swapped(both.host, both.random, both.tokens, blank_swaps)
    weights = bootstrap_weights(len(both.tokens), resamples, seed)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    equal = np.full((1, len(both.tokens)), 1 / len(both.tokens))
    return Routing(
        provenance=provenance(
            "routing_of",
            both.host,
            both.trained,
            both.tokens,
            seed=seed,
            confidence=confidence,
            resamples=resamples,
            swapped="tokens" if both.host.positions in _ADDED else "layer inputs",
            task=None if task is None else task.name,
        ),
        shares=parts.shares,
        positional_interval=parts.positional_interval,
        swap=trained.scores(equal)[0],
        swap_intervals=np.quantile(trained.scores(weights), tails, axis=0).T,
        stake=trained.mean_stake,
        behaviour=np.full(2, np.nan) if task is None else _behaviour(both, task, seed),
        shuffled_behaviour=np.full(2, np.nan)
        if task is None
        else _behaviour(both, task, seed, shuffled=True),
        null_shares=parts.null_shares,
        null_swap=blank.scores(equal)[0],
        null_stake=blank.mean_stake,
    )


# --- the arithmetic, on arrays ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Swaps:
    """Which query and which two keys, a swap of each sequence."""

    query: Int[np.ndarray, "round batch"]
    first: Int[np.ndarray, "round batch"]
    """a: the key attended to most, the query's own apart."""
    second: Int[np.ndarray, "round batch"]
    """b: any other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Weights of the two keys, uniform subtracted, before and after."""

    before: Float[np.ndarray, "round batch 2"]
    after: Float[np.ndarray, "round batch 2"]
    uniform: Float[np.ndarray, "round batch"]

    @property
    def mean_stake(self) -> float:
        """Mean mass at stake, in units of a uniform row's weight."""
        stake = np.abs(self.before[..., 0] - self.before[..., 1])
        return float(np.mean(stake / self.uniform))

    def scores(self, weights: Float[np.ndarray, "draw batch"]) -> Float[np.ndarray, "draw score"]:
        """Positional and symbolic score for each row of weights over sequences.

        >>> one = np.array([[[0.8, -0.1]]])
        >>> still = Outcome(before=one, after=one, uniform=np.array([[0.1]]))
        >>> still.scores(np.ones((1, 1))).round(2).tolist()
        [[1.0, -0.25]]
        """
        stake = np.abs(self.before[..., 0] - self.before[..., 1])
        cosines = (_cosine(self.after, self.before), _cosine(self.after, self.before[..., ::-1]))
        total = weights @ stake.sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = [weights @ (stake * cosine).sum(axis=0) / total for cosine in cosines]
        return np.nan_to_num(np.array(found).T)


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / np.where(size > 0, size, 1.0)


def draw_swaps(pattern: Float[Tensor, "batch query key"], rounds: int, seed: int) -> Swaps:
    """Swaps for each sequence: a late query, the other key that it attends to most, any third key.

    >>> swaps = draw_swaps(torch.eye(6).roll(-2, dims=1)[None], rounds=1, seed=0)
    >>> int(swaps.query[0, 0] - swaps.first[0, 0])
    2
    """
    weights = pattern.double().cpu().numpy()
    batch, length, _ = weights.shape
    generator = np.random.default_rng(seed)
    query = generator.integers(max(2, length // 2), length, size=(rounds, batch))
    rows = weights[np.arange(batch), query]
    own = np.arange(length) == query[..., None]
    later = np.arange(length) > query[..., None]
    first = np.where(own | later, -1.0, rows).argmax(axis=-1)
    chance = generator.random(rows.shape)
    taken = own | later | (np.arange(length) == first[..., None])
    second = np.where(taken, -1.0, chance).argmax(axis=-1)
    return Swaps(query=query, first=first, second=second)


def swapped_weights(
    logits: Float[np.ndarray, "batch query key"],
    moved: Float[np.ndarray, "round batch 2"],
    swaps: Swaps,
) -> Float[np.ndarray, "round batch 2"]:
    """The weights of keys a and b where their logits become ``moved`` and the others stay."""
    batch = np.arange(logits.shape[0])
    rows = logits[batch, swaps.query]
    top = np.maximum(rows.max(axis=-1), moved.max(axis=-1))[..., None]
    at = np.stack([swaps.first, swaps.second], axis=-1)
    old = np.exp(np.take_along_axis(rows, at, axis=-1) - top)
    new = np.exp(moved - top)
    total = np.exp(rows - top).sum(axis=-1, keepdims=True) - old.sum(axis=-1, keepdims=True)
    return new / (total + new.sum(axis=-1, keepdims=True))


# --- on a model ---------------------------------------------------------------------------------


def _swapped(
    host: Host, reading: LayerReading, tokens: Int[Tensor, "batch pos"], swaps: Swaps
) -> Outcome:
    """The weights of the swapped keys before and after."""
    pattern = reading.pattern[:, 0].double().cpu().numpy()
    batch = np.arange(len(pattern))
    at = np.stack([swaps.first, swaps.second], axis=-1)
    before = np.take_along_axis(pattern[batch, swaps.query], at, axis=-1)
    if host.positions in _ADDED or reading.q is None or reading.k is None:
        after = _rerun(host, reading, tokens, swaps)
    else:
        logits = reading.logits[:, 0].double().cpu().numpy()
        after = swapped_weights(logits, _moved_logits(reading, swaps), swaps)
    visible = reading.visible.sum(dim=-1).cpu().numpy()[swaps.query]
    uniform = 1 / visible
    return Outcome(
        before=before - uniform[..., None], after=after - uniform[..., None], uniform=uniform
    )


def _rerun(
    host: Host, reading: LayerReading, tokens: Int[Tensor, "batch pos"], swaps: Swaps
) -> Float[np.ndarray, "round batch 2"]:
    found = []
    batch = torch.arange(len(tokens))
    for query, first, second in zip(swaps.query, swaps.first, swaps.second, strict=True):
        a, b = torch.from_numpy(first), torch.from_numpy(second)
        changed = tokens.clone()
        changed[batch, a], changed[batch, b] = tokens[batch, b], tokens[batch, a]
        pattern = read(host.model, changed, reading.layer, reading.heads).pattern[:, 0]
        rows = pattern.double().cpu()[batch, torch.from_numpy(query)]
        found.append(torch.stack([rows[batch, a], rows[batch, b]], dim=-1).numpy())
    return np.stack(found)


def _moved_logits(reading: LayerReading, swaps: Swaps) -> Float[np.ndarray, "round batch 2"]:
    """Logits of b's key at a, and of a's at b; what q and k do not make stays with the place."""
    assert reading.q is not None  # checked where this is called
    assert reading.k is not None
    q, k = (x[:, :, 0].double().cpu().numpy() for x in (reading.q, reading.k))
    logits = reading.logits[:, 0].double().cpu().numpy()
    batch = np.arange(len(q))
    found = []
    for place, source in ((swaps.first, swaps.second), (swaps.second, swaps.first)):
        offset = swaps.query - place
        one, own, other = q[batch, swaps.query], k[batch, place], k[batch, source]
        here = logits[batch, swaps.query, place]
        found.append(
            here + _product(reading, one, other, offset) - _product(reading, one, own, offset)
        )
    return np.stack(found, axis=-1)


def _product(
    reading: LayerReading,
    q: Float[np.ndarray, "round batch d_head"],
    k: Float[np.ndarray, "round batch d_head"],
    offset: Int[np.ndarray, "round batch"],
) -> Float[np.ndarray, "round batch"]:
    """The logit of one query and one key at an offset, biases apart."""
    rotation = reading.rotation
    if rotation is None:
        product = (q * k).sum(axis=-1)
    else:
        still = rotation.unrotated_dims(q.shape[-1])
        turn = np.exp(-1j * offset[..., None] * rotation.frequencies)
        pairs = np.conj(rotation.complex_pairs(q)) * rotation.complex_pairs(k) * turn
        product = rotation.magnitude**2 * pairs.real.sum(axis=-1)
        product = product + (q[..., still] * k[..., still]).sum(axis=-1)
    logit = reading.scale * product
    cap = reading.soft_cap
    return logit if cap is None else cap * np.tanh(logit / cap)


def _behaviour(
    both: HeadReading, task: Task, seed: int, *, shuffled: bool = False
) -> Float[np.ndarray, " follows"]:
    """How often the answer is the token now at the right key, and the one that stood there.

    With ``shuffled``, a key drawn among those that the query sees stands for the right one.
    """
    host = both.host
    length, count = both.tokens.shape[1], len(both.tokens)
    generator = torch.Generator().manual_seed(seed)
    tokens = task.sample(count, length, generator=generator)
    sources = task.sources(length)
    query = int(np.flatnonzero(sources >= 0)[-1])
    right = np.full(count, sources[query])
    drawn = np.random.default_rng(seed)
    if shuffled:
        right = np.array([shuffled_sources(sources, drawn)[query] for _ in range(count)])
    taken = (np.arange(query + 1) == right[:, None]) | (np.arange(query + 1) == query)
    other = np.where(taken, -1.0, drawn.random(taken.shape)).argmax(axis=1)
    source, place, batch = torch.from_numpy(right), torch.from_numpy(other), torch.arange(count)
    changed = tokens.clone()
    changed[batch, source], changed[batch, place] = tokens[batch, place], tokens[batch, source]
    with torch.no_grad():
        answer = host.run(changed.to(host.device))[:, query].argmax(dim=-1).cpu()
    now, before = changed[batch, source], tokens[batch, source]
    differs = now != before
    return np.array([float((answer == token)[differs].double().mean()) for token in (now, before)])


def _check_task(task: Task, both: HeadReading) -> None:
    length = both.tokens.shape[1]
    if task.d_vocab > both.host.d_vocab:
        raise ValueError(
            f"task {task.name!r} has d_vocab={task.d_vocab} tokens, the model {both.host.d_vocab}; "
            "give the task fewer"
        )
    if not (task.sources(length) >= 0).any():
        raise ValueError(
            f"task {task.name!r} has no query at {length} tokens; pass tokens of "
            f"{task.min_length} or more"
        )
