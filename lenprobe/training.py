"""Training small models on a task, and measuring them at lengths they never saw.

One sequence length is drawn a step, the loss is the mean cross-entropy over all queries that have
a source, and the learning rate falls along a cosine. Everything drawn comes from one seed; the
global random state is left alone. Definition: ours, after the recipe that both papers share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lenprobe import encodings
from lenprobe.hosts import host_of
from lenprobe.models import spec_of
from lenprobe.results import Provenance, Result
from lenprobe.tasks import IGNORE, TokenTask

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

T = TypeVar("T")

SOLVED = 1e-4
"""Mean loss in nats, over the last 100 steps, at which a task counts as solved."""
WINDOW = 100
"""How many of the last losses that mean is over."""
_FLOATS = 2**24  # logits of one layer held at once while measuring


@dataclass(frozen=True, kw_only=True, eq=False)
class History(Result):
    """The course of one training run."""

    loss: Float[np.ndarray, " step"]
    """Mean cross-entropy over the batch's queries, in nats."""
    length: Int[np.ndarray, " step"]
    """Tokens a sequence."""
    solved: bool
    """Whether it stopped early because the loss stayed under the threshold."""

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self.loss)

    def summary(self) -> str:
        """How long it took and where the loss ended."""
        end = float(self.loss[-WINDOW:].mean())
        stopped = ", stopped early: solved" if self.solved else ""
        return f"trained {self.steps} steps{stopped}; loss {end:.4f} nats over the last {WINDOW}"

    def to_frame(self) -> "pd.DataFrame":
        """One row a step."""
        import pandas as pd

        step = np.arange(1, self.steps + 1)
        return pd.DataFrame({"step": step, "length": self.length, "loss": self.loss})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The loss by step."""
        from lenprobe.plots import BLUE, _axes

        ax = _axes(ax)
        ax.semilogy(np.arange(1, self.steps + 1), self.loss, color=BLUE, lw=0.8)
        ax.set(xlabel="training step", ylabel="loss (nats a query)")
        return ax


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthAccuracy(Result):
    """Accuracy by sequence length, new positions apart from trained ones."""

    lengths: Int[np.ndarray, " length"]
    """Tokens a sequence."""
    last_query: Float[np.ndarray, " length"]
    """At the last query that is asked, the furthest one out."""
    all_queries: Float[np.ndarray, " length"]
    """Over all queries that are asked."""
    trained: Float[np.ndarray, " length"]
    """Over those at positions that training met (below ``train_length``); NaN for none."""
    new: Float[np.ndarray, " length"]
    """Over those at positions that it did not; NaN for none."""
    chance: float
    """One over the vocabulary."""
    train_length: int | None
    sequences: int
    """Random sequences a length."""

    def at(self, length: int) -> float:
        """Accuracy at the last query of a length.

        Raises:
            ValueError: the length was not measured.
        """
        found = np.flatnonzero(self.lengths == length)
        if not found.size:
            raise ValueError(f"length={length} was not measured; take one of {[*self.lengths]}")
        return float(self.last_query[found[0]])

    def summary(self) -> str:
        """Accuracy at the last query by length."""
        pairs = zip(self.lengths, self.last_query, strict=True)
        curve = ", ".join(f"{accuracy:.3f} at {length}" for length, accuracy in pairs)
        trained = "" if self.train_length is None else f"; trained at n ≤ {self.train_length}"
        return f"accuracy at the last query: {curve}{trained} (chance {self.chance:.3f})"

    def to_frame(self) -> "pd.DataFrame":
        """One row a length."""
        import pandas as pd

        names = ("lengths", "last_query", "all_queries", "trained", "new")
        return pd.DataFrame({name: getattr(self, name) for name in names})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Accuracy at the last query and at new positions, by length."""
        from lenprobe.plots import plot_accuracy

        curves = {"last query": (self.lengths, self.last_query)}
        if np.isfinite(self.new).any():
            curves["new positions"] = (self.lengths, self.new)
        return plot_accuracy(curves, train_length=self.train_length, chance=self.chance, ax=ax)


def fit(
    model: Any,
    task: TokenTask,
    lengths: Iterable[int],
    steps: int = 2000,
    *,
    batch: int = 32,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.0,
    seed: int = 0,
    solved: float | None = SOLVED,
    progress: bool = True,
) -> History:
    """Trains the model in place; returns the course of the loss.

    >>> from lenprobe import build, FixedOffset
    >>> model = build("rope")
    >>> fit(model, FixedOffset(1), lengths=range(4, 9), steps=20, progress=False).steps
    20

    A model of the encoding ``learned_offset`` starts each sequence at a random position. What was
    trained on is noted in ``model.lenprobe``.

    Args:
        model: as ``build`` made it, or any model that ``host_of`` knows with a large enough
            vocabulary.
        task: gives the sequences and the right tokens.
        lengths: sequence lengths to train on; one is drawn a step.
        steps: most optimiser steps.
        batch: sequences a step.
        learning_rate: of AdamW at the start; it falls to 0 along a cosine over ``steps``.
        weight_decay: of AdamW.
        seed: of lengths, sequences and first positions.
        solved: stops once the mean loss of the last 100 steps is below this, in nats; None never
            stops early.
        progress: shows a progress bar on standard error.

    Raises:
        ValueError, TypeError: an argument is out of its range; the model is as it was.
    """
    host = host_of(model)
    lengths = check_lengths(lengths, task, host)
    check_settings(steps, batch, learning_rate, weight_decay)
    spec = spec_of(model)
    offset = spec is not None and encodings.get(spec.encoding).trains_with_offset
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, cosine(steps))
    losses, drawn, was_training = [], [], model.training
    model.train()
    try:
        for _ in bar(range(steps), f"training {task.name}", progress):
            tokens, first = draw(task, lengths, batch, host.n_ctx, offset, generator)
            with host.placed(first, tokens.shape[1]) as arguments:
                logits = host.run(tokens.to(host.device), **arguments)
            loss = cross_entropy(logits, task.targets(tokens).to(host.device))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            drawn.append(tokens.shape[1])
            if is_solved(losses, solved):
                break
    finally:
        model.train(was_training)
    if spec is not None:
        model.lenprobe = replace(spec, train_length=max(lengths), task=task.name)
    return History(
        provenance=Provenance(
            verb="fit",
            model=host.description,
            seed=seed,
            settings={
                "task": task.name,
                "lengths": list(lengths),
                "steps": steps,
                "batch": batch,
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "solved": solved,
            },
        ),
        loss=np.array(losses),
        length=np.array(drawn),
        solved=is_solved(losses, solved),
    )


def accuracy_by_length(
    model: Any,
    task: TokenTask,
    lengths: Iterable[int],
    *,
    sequences: int = 1024,
    seed: int = 0,
    train_length: int | None = None,
) -> LengthAccuracy:
    """Accuracy on random sequences of each length, new positions apart from trained ones.

    >>> from lenprobe import build, FixedOffset
    >>> found = accuracy_by_length(build("rope"), FixedOffset(3), [8, 16], sequences=64)
    >>> found.lengths.tolist(), found.chance
    ([8, 16], 0.0625)

    Args:
        model: any model that ``host_of`` knows.
        task: gives the sequences and the right tokens.
        lengths: of the sequences, each measured apart.
        sequences: how many a length; the standard error is at most 1 / (2 √sequences).
        seed: of the sequences.
        train_length: positions below it are trained ones; what the model says by default.

    Raises:
        ValueError, TypeError: an argument is out of its range.
    """
    host = host_of(model)
    wanted = check_lengths(lengths, task, host)
    if sequences < 1:
        raise ValueError(f"sequences={sequences} measures nothing; take 1 or more")
    spec = spec_of(model)
    if train_length is None and spec is not None:
        train_length = spec.train_length
    rows = []
    for length in wanted:
        generator = torch.Generator().manual_seed(seed)
        tokens = task.sample(sequences, length, generator=generator)
        asked = (task.targets(tokens) != IGNORE).numpy()
        rows.append(_scores(correct(model, task, tokens), asked, train_length))
    last, every, trained, new = np.array(rows).T
    return LengthAccuracy(
        provenance=Provenance(
            verb="accuracy_by_length",
            model=host.description,
            seed=seed,
            settings={"task": task.name},
        ),
        lengths=np.array(wanted),
        last_query=last,
        all_queries=every,
        trained=trained,
        new=new,
        chance=1 / task.d_vocab,
        train_length=train_length,
        sequences=sequences,
    )


def correct(
    model: Any, task: TokenTask, tokens: Int[Tensor, "batch pos"]
) -> Bool[np.ndarray, "batch query"]:
    """Whether the model's most likely token is the right one; False where nothing is asked."""
    host = host_of(model)
    chunk = max(1, _FLOATS // (host.n_heads * tokens.shape[1] ** 2))
    found = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for part in tokens.split(chunk):
                answer = host.run(part.to(host.device)).argmax(dim=-1).cpu()
                found.append((answer == task.targets(part)).numpy())
    finally:
        model.train(was_training)
    return np.concatenate(found)


def draw(
    task: TokenTask,
    lengths: list[int],
    batch: int,
    n_ctx: int,
    offset: bool,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"] | None]:
    """One batch of one length, and the first position of each sequence where it is not 0."""
    length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
    tokens = task.sample(batch, length, generator=generator)
    if not offset:
        return tokens, None
    return tokens, torch.randint(0, n_ctx - length + 1, (batch,), generator=generator)


def cross_entropy(
    logits: Float[Tensor, "batch query d_vocab"], targets: Int[Tensor, "batch query"]
) -> Float[Tensor, ""]:
    """Mean over the queries that are asked, in nats."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
    )


def cosine(steps: int) -> Any:
    """The learning rate's factor by step: from 1 to 0 along half a cosine."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))


def is_solved(losses: list[float], solved: float | None) -> bool:
    """Whether the last 100 losses are below the threshold on average."""
    if solved is None or len(losses) < WINDOW:
        return False
    return sum(losses[-WINDOW:]) < solved * WINDOW


def _scores(
    hits: Bool[np.ndarray, "batch query"],
    asked: Bool[np.ndarray, "batch query"],
    train_length: int | None,
) -> list[float]:
    query = np.arange(asked.shape[1])
    last = np.flatnonzero(asked.any(axis=0))[-1]
    old = query < (train_length or 0)
    parts = (asked & (query == last), asked, asked & old, asked & ~old)
    return [float(hits[part].mean()) if part.any() else math.nan for part in parts]


def check_lengths(lengths: Iterable[int], task: TokenTask, host: Any) -> list[int]:
    """The lengths as a list, or an error that names the one that task or model cannot take."""
    found = [int(length) for length in lengths]
    if not found:
        raise ValueError("lengths is empty; give at least one sequence length")
    if task.d_vocab > host.d_vocab:
        raise ValueError(
            f"task {task.name!r} has d_vocab={task.d_vocab} tokens, the model {host.d_vocab}; "
            f"build the model with d_vocab={task.d_vocab}, or give the task fewer"
        )
    for length in found:
        if not task.asks(length):
            raise ValueError(
                f"lengths holds {length}, at which task {task.name!r} has no query; take "
                f"{task.min_length} or more"
            )
        if length > host.n_ctx:
            raise ValueError(
                f"lengths holds {length}, but the model takes at most n_ctx={host.n_ctx} tokens; "
                f"take up to {host.n_ctx}, or build it with a larger n_ctx"
            )
    return found


def check_settings(steps: int, batch: int, learning_rate: float, weight_decay: float) -> None:
    """Raises where a setting of the optimiser is out of its range."""
    faults = [f"{n}={v}: 1 or more" for n, v in (("steps", steps), ("batch", batch)) if v < 1]
    if not 0 < learning_rate < math.inf:
        faults.append(f"learning_rate={learning_rate}: above 0")
    if not 0 <= weight_decay < math.inf:
        faults.append(f"weight_decay={weight_decay}: 0 or more")
    if faults:
        raise ValueError("cannot train; take " + "; ".join(faults))


def bar(items: Iterable[T], title: str, progress: bool, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on standard error where it is wanted."""
    if not progress:
        return items
    from tqdm.auto import tqdm

    found: Iterable[T] = tqdm(items, desc=title, total=total, unit="step")
    return found
