"""Judging a positional kernel against a source map, on plain arrays.

A kernel carries a rule to a query i where the largest of its values over the visible keys
``j ≤ i`` is at the rule's key, and nowhere else: ties are misses. Definition: ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

TIE = 1e-6
"""Keys whose values differ by less than this share of the row's range are tied."""


@runtime_checkable
class Rule(Protocol):
    """What is needed of a task; every ``lenprobe.tasks.Task`` with a source map has it."""

    @property
    def name(self) -> str: ...

    @property
    def min_length(self) -> int: ...

    @property
    def changes_with_length(self) -> bool: ...

    def sources(self, length: int) -> np.ndarray:
        """The right key of each query at this length, −1 for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """How a kernel does on some queries."""

    hit: Bool[np.ndarray, " query"]
    """Whether the unique argmax is the rule's key."""
    margin: Float[np.ndarray, " query"]
    """Value at the rule's key minus the largest of the others; infinite where it has none."""

    @property
    def share(self) -> float:
        """Of hits."""
        return float(self.hit.mean())


def judge(
    kernel: Float[np.ndarray, "row key"],
    queries: Int[np.ndarray, " query"],
    sources: Int[np.ndarray, " query"],
) -> Verdict:
    """Which queries have their unique argmax at the source.

    >>> verdict = judge(np.array([[0.0, 0.0], [2.0, 1.0]]), np.array([1]), np.array([0]))
    >>> verdict.share, float(verdict.margin[0])
    (1.0, 1.0)

    Args:
        kernel: values; a row may hold anything beyond its own column. −inf marks keys that the
            query does not see.
        queries: i, the rows judged.
        sources: τ(i) ≤ i. A source that the query does not see is a miss.
    """
    rows = kernel[queries]
    visible = (np.arange(kernel.shape[1]) <= queries[:, None]) & np.isfinite(rows)
    index = np.arange(len(queries))
    own = rows[index, sources]
    extent = np.where(visible, rows, -np.inf).max(1) - np.where(visible, rows, np.inf).min(1)
    visible[index, sources] = False
    margin = own - np.where(visible, rows, -np.inf).max(axis=1, initial=-np.inf)
    return Verdict(hit=margin > TIE * extent, margin=margin)


def new_queries(
    rule: Rule, length: int, train_length: int
) -> tuple[Int[np.ndarray, " query"], Int[np.ndarray, " query"]]:
    """The queries that α judges at a length, and their sources.

    ``i ≥ L``, or all where the rule changes with the length.
    """
    sources = np.asarray(rule.sources(length), dtype=np.int64)
    first = 0 if rule.changes_with_length else train_length
    queries = np.flatnonzero((sources >= 0) & (np.arange(length) >= first))
    return queries, sources[queries]


def judge_new(
    kernel: Float[np.ndarray, "row key"], rule: Rule, length: int, train_length: int
) -> Verdict:
    """How the kernel does on the new queries up to a length."""
    return judge(kernel, *new_queries(rule, length, train_length))


def judge_short(
    kernel: Float[np.ndarray, "row key"],
    rule: Rule,
    lengths: Iterable[int],
    shifts: Iterable[int] = (0,),
) -> Verdict:
    """How the kernel does on each distinct (query, source) of the short lengths.

    ``shifts`` are the positions at which the sequence begins; what stands before is not visible.
    """
    found = {
        (int(query), int(source))
        for length in lengths
        for query, source in zip(*new_queries(rule, length, 0), strict=True)
    }
    queries, sources = np.array(sorted(found), dtype=np.int64).reshape(-1, 2).T
    parts = [judge(kernel[shift:, shift:], queries, sources) for shift in shifts]
    return Verdict(
        hit=np.concatenate([part.hit for part in parts]),
        margin=np.concatenate([part.margin for part in parts]),
    )


def chance(rule: Rule, length: int, train_length: int) -> float:
    """The share of hits expected of a source map drawn uniformly among the visible keys."""
    queries, _ = new_queries(rule, length, train_length)
    return float(np.mean(1.0 / (queries + 1)))


def best_rule(kernel: Float[np.ndarray, "row key"], length: int) -> tuple[str, int, int]:
    """The fixed offset or absolute slot that most queries of a short grid follow.

    >>> best_rule(np.eye(6, k=-2), 6)
    ('offset', 2, 4)

    Args:
        kernel: values, at least [length, length].
        length: of the short grid.

    Returns:
        ``"offset"`` or ``"slot"``, which, and how many of the queries 1 .. length − 1 follow it.
        Offsets come first among equals, then the smaller number.
    """
    queries = np.arange(1, length)
    best = ("offset", 0, -1)
    for kind in ("offset", "slot"):
        for number in range(length):
            sources = queries - number if kind == "offset" else np.full_like(queries, number)
            seen = (sources >= 0) & (sources <= queries)
            count = int(judge(kernel, queries[seen], sources[seen]).hit.sum())
            if count > best[2]:
                best = (kind, number, count)
    return best


def check_rule(rule: Rule) -> None:
    """Raises for tasks whose answer depends on the content."""
    if not callable(getattr(rule, "sources", None)):
        raise ValueError(
            f"task {getattr(rule, 'name', rule)!r} has no source map: where its answer stands "
            "depends on the content, which α_L does not cover; take a task with sources(length)"
        )


def check_lengths(
    rule: Rule, train_length: int, lengths: Iterable[int]
) -> Int[np.ndarray, " length"]:
    """The lengths N as an array, or an error that names the one that is wrong."""
    found = np.array(list(lengths), dtype=np.int64)
    if not found.size:
        raise ValueError("lengths is empty; give at least one N > L")
    if train_length < 2:
        raise ValueError(f"train_length={train_length}; at least 2 keys are needed to choose")
    for length in found.tolist():
        if length <= train_length:
            raise ValueError(
                f"lengths holds N={length}, not beyond train_length={train_length}; there are no "
                f"new queries, so take N ≥ {train_length + 1}"
            )
        if not new_queries(rule, length, train_length)[0].size:
            raise ValueError(
                f"task {rule.name!r} has no new query at length {length} "
                f"(train_length={train_length}); take a longer one"
            )
    return found


def short_lengths(rule: Rule, train_length: int, lengths: Iterable[int] | None) -> list[int]:
    """The lengths fitted on: those given, or all from the rule's shortest up to L."""
    if lengths is None:
        found = list(range(min(rule.min_length, train_length), train_length + 1))
    else:
        found = sorted(set(lengths))
        if not found or found[0] < 1 or found[-1] > train_length:
            raise ValueError(
                f"fit_lengths={found} must lie in 1..train_length={train_length} and not be empty"
            )
    if not any((np.asarray(rule.sources(n)) >= 0).any() for n in found):
        raise ValueError(
            f"task {rule.name!r} has no query at lengths {found[0]}..{found[-1]}; "
            f"take train_length ≥ {rule.min_length}"
        )
    return found
