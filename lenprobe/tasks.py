"""Length-generalisation tasks: a sampler of token sequences and a source map τ.

At query i of a sequence of length n the model is to give the token that stands at key τ(i; n).
Tokens are uniform and independent, so that nothing but the position of the right key can be
learned, and chance is one over the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

IGNORE = -100
"""The target of a query that is asked nothing."""


class TokenTask(ABC):
    """Random tokens, and the right answer at some of their positions."""

    d_vocab: int
    """How many tokens."""
    in_scope: bool
    """Whether α_L covers it: positions alone decide where the answer stands."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name with the task's number, as ``offset 3``."""

    @property
    @abstractmethod
    def min_length(self) -> int:
        """The shortest sequence with a query."""

    @abstractmethod
    def targets(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """The right token at each query; −100 where nothing is asked."""

    def asks(self, length: int) -> bool:
        """Whether sequences of this length have a query."""
        return length >= self.min_length

    def sample(
        self, batch: int, length: int, *, generator: torch.Generator
    ) -> Int[Tensor, "batch pos"]:
        """Random token sequences."""
        return torch.randint(0, self.d_vocab, (batch, length), generator=generator)


class Task(TokenTask):
    """A source map over random tokens."""

    in_scope = True

    @property
    def changes_with_length(self) -> bool:
        """Whether τ(i; n) depends on n."""
        return False

    @abstractmethod
    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """τ(i; length) of every query; −1 where there is none."""

    def asks(self, length: int) -> bool:
        """Whether sequences of this length have a query."""
        return super().asks(length) and bool((self.sources(max(length, 1)) >= 0).any())

    def targets(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """The right token at each query; −100 where nothing is asked."""
        sources = torch.from_numpy(self.sources(tokens.shape[1])).to(tokens.device)
        found = tokens[:, sources.clamp(min=0)]
        return found.masked_fill(sources < 0, IGNORE)


@dataclass(frozen=True)
class FixedOffset(Task):
    """The token d positions back.

    >>> FixedOffset(3).sources(5).tolist()
    [-1, -1, -1, 0, 1]

    Args:
        d: the offset, 0 or more.
        d_vocab: how many tokens.
    """

    d: int
    d_vocab: int = 16

    def __post_init__(self) -> None:
        check_whole("d", self.d, 0)
        check_whole("d_vocab", self.d_vocab, 2)

    @property
    def name(self) -> str:
        """``offset d``."""
        return f"offset {self.d}"

    @property
    def min_length(self) -> int:
        """D + 1."""
        return self.d + 1

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """I − d."""
        return np.maximum(np.arange(length) - self.d, -1)


@dataclass(frozen=True)
class AbsoluteSlot(Task):
    """The token at position p, asked of every later query.

    >>> AbsoluteSlot(2).sources(5).tolist()
    [-1, -1, -1, 2, 2]
    """

    p: int
    d_vocab: int = 16

    def __post_init__(self) -> None:
        check_whole("p", self.p, 0)
        check_whole("d_vocab", self.d_vocab, 2)

    @property
    def name(self) -> str:
        """``slot p``."""
        return f"slot {self.p}"

    @property
    def min_length(self) -> int:
        """P + 2."""
        return self.p + 2

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """p, for i > p."""
        return np.where(np.arange(length) > self.p, self.p, -1)


@dataclass(frozen=True)
class HalfCopy(Task):
    """The second half repeats the first: τ(i; n) = i − n/2.

    >>> HalfCopy().sources(6).tolist()
    [-1, -1, -1, 0, 1, 2]
    """

    d_vocab: int = 16

    name = "half copy"
    min_length = 2
    changes_with_length = True

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """I − n/2 on the second half; the half of an odd length is rounded up."""
        return np.maximum(np.arange(length) - (length + 1) // 2, -1)


@dataclass(frozen=True)
class Reversal(Task):
    """The second half mirrors the first: τ(i; n) = n − 1 − i.

    >>> Reversal().sources(6).tolist()
    [-1, -1, -1, 2, 1, 0]
    """

    d_vocab: int = 16

    name = "reversal"
    min_length = 2
    changes_with_length = True

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """N − 1 − i, where that stands before i."""
        query = np.arange(length)
        return np.where(2 * query > length - 1, length - 1 - query, -1)


@dataclass(frozen=True)
class Strided(Task):
    """The token two back, asked of even queries alone.

    >>> Strided().sources(6).tolist()
    [-1, -1, 0, -1, 2, -1]
    """

    d_vocab: int = 16

    name = "strided"
    min_length = 3

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """I − 2 for even i ≥ 2."""
        query = np.arange(length)
        return np.where((query % 2 == 0) & (query >= 2), query - 2, -1)


@dataclass(frozen=True)
class SourceMap(Task):
    """Any rule of yours.

    >>> first = SourceMap("first token", lambda query, length: np.zeros_like(query))
    >>> first.sources(3).tolist()
    [0, 0, 0]

    Args:
        label: a short name.
        rule: from the queries 0 .. n − 1 and the length n to the key of each; −1 for none.
        shortest: the shortest sequence with a query.
        by_length: whether τ(i; n) depends on n.
        d_vocab: how many tokens.
    """

    label: str
    rule: Callable[[np.ndarray, int], Any]
    shortest: int = 2
    by_length: bool = False
    d_vocab: int = 16

    @property
    def name(self) -> str:
        """The label."""
        return self.label

    @property
    def min_length(self) -> int:
        """As given."""
        return self.shortest

    @property
    def changes_with_length(self) -> bool:
        """As given."""
        return self.by_length

    def sources(self, length: int) -> Int[np.ndarray, " query"]:
        """What the rule gives.

        Raises:
            ValueError: it gives another shape, or keys after the query or below −1.
        """
        query = np.arange(length)
        found = np.asarray(self.rule(query, length))
        if found.shape != query.shape or found.dtype.kind not in "iu":
            raise ValueError(
                f"the rule of task {self.label!r} gives {found.dtype} of shape "
                f"{list(found.shape)} at length {length}; return {length} integers, −1 for none"
            )
        wrong = np.flatnonzero((found > query) | (found < -1))
        if wrong.size:
            i = int(wrong[0])
            raise ValueError(
                f"the rule of task {self.label!r} sends query {i} to key {found[i]} at length "
                f"{length}; a causal query sees keys 0..{i}, −1 for none"
            )
        return found.astype(np.int64)


def check_whole(name: str, value: int, least: int) -> None:
    """Raises where a task's number is not whole, or too small."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a whole number")
    if value < least:
        raise ValueError(f"{name}={value} is out of range; take {least} or more")
