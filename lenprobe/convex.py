"""The convex fit behind α_L: a positional kernel that is linear in its parameters.

With features φ(i, j) the kernel is ``s_θ(i, j) = ⟨θ, φ(i, j)⟩``, and θ minimises

    F(θ) = Σ_q w_q · [ log Σ_j e^{s_θ(q, j)} − Σ_j t_q(j) s_θ(q, j) ] + λ/2 ‖θ‖²

over the queries q of a grid: their visible keys j, their target distribution t_q and their weight
w_q (Σ w = 1). F is λ-strongly convex, so θ is one answer, whatever the start. It is found by
Newton's method with the exact Hessian and a backtracking line search, in float64.
Definition: ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import linalg, sparse
from scipy.sparse.linalg import splu

Design: TypeAlias = np.ndarray | sparse.csr_array
"""Features of pairs, one row a pair: dense, or sparse where most are zero."""

GRADIENT_TOLERANCE = 1e-9
"""Largest gradient entry of F at the answer."""

_MAX_STEPS = 500


@runtime_checkable
class SourceMap(Protocol):
    """What a grid needs of a task."""

    @property
    def name(self) -> str: ...

    def sources(self, length: int) -> np.ndarray:
        """The right key of each query at this length, −1 for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The queries that a kernel is fitted on, those with the same visible keys merged.

    Query ``g`` stands at position ``query[g]`` and sees the keys ``first[g] .. query[g]``; column k
    of ``target`` and ``visible`` is the key ``first[g] + k``.
    """

    query: Int[np.ndarray, " group"]
    first: Int[np.ndarray, " group"]
    weight: Float[np.ndarray, " group"]
    target: Float[np.ndarray, "group key"]
    """Distribution over keys. It has more than one entry where lengths contradict each other."""

    @property
    def visible(self) -> Bool[np.ndarray, "group key"]:
        """Which columns are keys that the query sees."""
        keys = np.arange(self.target.shape[1])
        return np.asarray(keys <= (self.query - self.first)[:, None])

    def pairs(self) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
        """The query and the key of every visible pair, group after group."""
        group, key = np.nonzero(self.visible)
        return self.query[group], self.first[group] + key

    def cross_entropy(self, kernel: Float[np.ndarray, "row key"]) -> float:
        """The mean cross-entropy of the softmax of a kernel's rows, in nats."""
        return _Loss(np.zeros((int(self.visible.sum()), 0)), self, 1.0).of(kernel[self.pairs()])


def grid(task: SourceMap, lengths: Iterable[int], shifts: Iterable[int] = (0,)) -> Grid:
    """The queries of a task at the lengths, each distinct (query, source) once.

    Every query of a causal head is the last one of a shorter sequence, so a rule that does not
    change with the length gives the same queries at all lengths up to the longest.

    Args:
        task: its ``sources(length)`` give the right key of each query, −1 for none.
        lengths: sequence lengths n, in tokens. Those without any query add nothing.
        shifts: first positions of the sequence, for tables whose every row is trained.

    Raises:
        ValueError: no length has a query.
    """
    lengths, shifts = list(lengths), list(shifts)
    found: dict[tuple[int, int], set[int]] = {}
    for length in lengths:
        sources = np.asarray(task.sources(length))
        for query in np.flatnonzero(sources >= 0).tolist():
            for shift in shifts:
                found.setdefault((query + shift, shift), set()).add(int(sources[query]))
    if not found:
        raise ValueError(
            f"task {task.name!r} has no query at lengths {lengths}; fit on longer sequences"
        )
    where = np.array(sorted(found))
    visible = where[:, 0] - where[:, 1] + 1
    target = np.zeros((len(where), visible.max()))
    for row, (query, first) in zip(target, where.tolist(), strict=True):
        row[list(found[query, first])] = 1.0
    weight = target.sum(axis=1)
    return Grid(
        query=where[:, 0],
        first=where[:, 1],
        weight=weight / weight.sum(),
        target=target / weight[:, None],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The parameters that minimise F, and how well they do."""

    theta: Float[np.ndarray, " feature"]
    cross_entropy: float
    """Mean over the grid, without the penalty, in nats."""
    gradient: float
    """Largest absolute entry of the gradient of F at θ."""
    steps: int


def minimise(
    design: Design,
    grid: Grid,
    penalty: float,
    *,
    nonnegative: bool = False,
    start: Float[np.ndarray, " feature"] | None = None,
) -> Fit:
    """The parameters θ that minimise F.

    >>> task = type("T", (), {"name": "copy", "sources": lambda self, n: np.arange(n) - 1})()
    >>> previous = grid(task, [3])
    >>> query, key = previous.pairs()
    >>> fit = minimise(np.eye(3)[query - key], previous, penalty=1e-4)
    >>> int(fit.theta.argmax()), fit.gradient < 1e-9
    (1, True)

    Args:
        design: features of the grid's pairs, in the order of ``grid.pairs()``.
        grid: the queries.
        penalty: λ > 0.
        nonnegative: θ ≥ 0; for one feature only.
        start: where Newton's method starts; zero where None.

    Raises:
        ValueError: a shape or λ is wrong, or a feature is not finite.
        RuntimeError: no convergence, which a convex F in range of float64 does not show.
    """
    _check(design, grid, penalty, nonnegative, start)
    width = design.shape[1]
    theta = np.zeros(width) if start is None else np.array(start, dtype=np.float64)
    if isinstance(design, np.ndarray) and width > design.shape[0]:
        return _in_row_space(design, grid, penalty, theta)
    if not isinstance(design, np.ndarray):
        return _in_used_columns(design, grid, penalty, theta)
    loss = _Loss(design, grid, penalty)
    fit = _newton(loss, theta)
    if nonnegative and fit.theta[0] < 0:  # in one dimension the bound is the answer
        zero = np.zeros(1)
        return Fit(theta=zero, cross_entropy=loss.value(zero), gradient=0.0, steps=fit.steps)
    return fit


def _in_row_space(
    design: np.ndarray, grid: Grid, penalty: float, start: Float[np.ndarray, " feature"]
) -> Fit:
    """The same minimum, sought in the span of the features, where it must lie (λ > 0)."""
    _, singular, rows = linalg.svd(design, full_matrices=False)
    rows = rows[singular > singular[0] * 1e-14]
    fit = _newton(_Loss(design @ rows.T, grid, penalty), rows @ start)
    return replace(fit, theta=rows.T @ fit.theta)


def _in_used_columns(
    design: sparse.csr_array, grid: Grid, penalty: float, start: Float[np.ndarray, " feature"]
) -> Fit:
    """The same minimum without the features that are zero on every pair, whose θ is 0."""
    used = np.unique(design.indices)
    fit = _newton(_Loss(design[:, used], grid, penalty), start[used])
    theta = np.zeros_like(start)
    theta[used] = fit.theta
    return replace(fit, theta=theta)


class _Loss:
    """F with its gradient and Hessian."""

    def __init__(self, design: Design, grid: Grid, penalty: float) -> None:
        self.design, self.grid, self.penalty = design, grid, penalty
        self.visible = grid.visible
        self.target = grid.target[self.visible]
        self.group = np.nonzero(self.visible)[0]
        self.weight = grid.weight[self.group]
        self.first_pairs = np.flatnonzero(np.diff(self.group, prepend=-1))

    def _log_softmax(self, values: np.ndarray) -> np.ndarray:
        logits = np.full(self.visible.shape, -np.inf)
        logits[self.visible] = values
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return np.asarray(logits[self.visible])

    def of(self, values: np.ndarray) -> float:
        """The mean cross-entropy of the pairs' logits."""
        return float(-(self.weight * self.target) @ self._log_softmax(values))

    def value(self, theta: np.ndarray) -> float:
        """The mean cross-entropy, without the penalty."""
        return self.of(self.design @ theta)

    def objective(self, theta: np.ndarray) -> float:
        """F."""
        return self.value(theta) + 0.5 * self.penalty * float(theta @ theta)

    def gradient(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """∇F, and the softmax of every pair."""
        softmax = np.exp(self._log_softmax(self.design @ theta))
        residual = self.weight * (softmax - self.target)
        return np.asarray(self.design.T @ residual) + self.penalty * theta, softmax

    def newton_step(self, gradient: np.ndarray, softmax: np.ndarray) -> np.ndarray:
        """H⁻¹ ∇F with H = Φᵀ (diag(w p) − blocks of w p pᵀ) Φ + λ."""
        mass = self.weight * softmax
        if isinstance(self.design, np.ndarray):
            mean = np.add.reduceat(softmax[:, None] * self.design, self.first_pairs)
            spread = np.sqrt(mass)[:, None] * (self.design - mean[self.group])
            hessian = spread.T @ spread
            hessian[np.diag_indices_from(hessian)] += self.penalty
            return np.asarray(linalg.cho_solve(linalg.cho_factor(hessian), gradient))
        pairs = np.arange(len(self.group))
        averages = sparse.csr_array((softmax, (self.group, pairs)))
        mean = averages @ self.design
        first = self.design.T @ sparse.diags_array(mass) @ self.design
        second = mean.T @ sparse.diags_array(self.grid.weight) @ mean
        ridge = self.penalty * sparse.eye_array(self.design.shape[1])
        return np.asarray(splu(sparse.csc_array(first - second + ridge)).solve(gradient))


def _newton(loss: _Loss, theta: np.ndarray) -> Fit:
    here = loss.objective(theta)
    for step in range(_MAX_STEPS):
        gradient, softmax = loss.gradient(theta)
        largest = float(np.abs(gradient).max(initial=0.0))
        direction = loss.newton_step(gradient, softmax)
        decrease = float(gradient @ direction)
        rounding = 1e-15 * max(1.0, abs(here))
        if decrease <= rounding and largest <= GRADIENT_TOLERANCE:
            theta = theta - direction  # the last step is quadratic and below what F resolves
            gradient, _ = loss.gradient(theta)
            return Fit(
                theta=theta,
                cross_entropy=loss.value(theta),
                gradient=float(np.abs(gradient).max(initial=0.0)),
                steps=step + 1,
            )
        size = 1.0
        while loss.objective(theta - size * direction) > here - 1e-4 * size * decrease + rounding:
            size *= 0.5
            if size < 1e-12:
                raise RuntimeError(
                    f"the fit stopped at gradient {largest:.1e}; features of size "
                    f"{_largest(loss.design):.1e} with λ={loss.penalty:.1e} are out of range of "
                    "float64, so scale the features to about 1 or take a larger λ"
                )
        theta = theta - size * direction
        here = loss.objective(theta)
    raise RuntimeError(
        f"no convergence in {_MAX_STEPS} Newton steps (gradient {largest:.1e}); take a larger λ "
        f"than {loss.penalty:.1e} or scale the features to about 1"
    )


def _largest(design: Design) -> float:
    return float(np.abs(design).max()) if design.shape[1] else 0.0


def _check(
    design: Design,
    grid: Grid,
    penalty: float,
    nonnegative: bool,
    start: np.ndarray | None,
) -> None:
    pairs = int(grid.visible.sum())
    if design.ndim != 2 or design.shape[0] != pairs:
        raise ValueError(f"design has shape {design.shape}; the grid has {pairs} pairs, one a row")
    if not (np.isfinite(penalty) and penalty > 0):
        raise ValueError(f"penalty={penalty} must be a finite λ > 0; without it θ is not unique")
    values = design if isinstance(design, np.ndarray) else design.data
    if not np.isfinite(values).all():
        raise ValueError("the features hold values that are not finite; mask nothing, return 0")
    if nonnegative and design.shape[1] != 1:
        raise ValueError(f"nonnegative holds for 1 feature, not {design.shape[1]}")
    if start is not None and np.shape(start) != (design.shape[1],):
        raise ValueError(f"start has shape {np.shape(start)}; θ has shape ({design.shape[1]},)")
