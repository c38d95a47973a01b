"""Encoding classes for α_L: features φ(i, j) of a pair, and the kernels they span.

A class says which positional kernels ``s_θ(i, j) = ⟨θ, φ(i, j)⟩`` an encoding can make. Three
kinds cover all of them: features of the offset alone (:class:`OffsetFeatures`), bilinear ones of
two position rows (:class:`BilinearFeatures`), and any function of the pair
(:class:`PairFeatures`), which is how a user brings an encoding of their own.
Definition: ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from lenprobe.convex import Design

PairFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""φ: the queries i and keys j of some pairs, [pair] each, to features [pair, feature]."""

_CHUNK = 2**22  # floats of features held at once


class FeatureMap(ABC):
    """The kernels of one encoding, up to their parameters θ."""

    name: str
    nonnegative: bool = False
    """θ ≥ 0: a slope whose sign the model fixes."""
    every_row_trained: bool = False
    """Training shifts the sequence over all positions, so the fit does too."""

    @abstractmethod
    def features(self, query: Int[np.ndarray, " pair"], key: Int[np.ndarray, " pair"]) -> Design:
        """φ of each pair, float64 [pair, feature], dense or sparse."""

    @abstractmethod
    def kernel(
        self, theta: Float[np.ndarray, " feature"], length: int
    ) -> Float[np.ndarray, "query key"]:
        """s_θ at every pair up to a length; what stands above the diagonal has no meaning."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairFeatures(FeatureMap):
    """Features given by any function of the pair.

    >>> parity = PairFeatures(name="parity", function=lambda i, j: ((i - j) % 2)[:, None])
    >>> parity.kernel(np.ones(1), 3)[2].tolist()
    [0.0, 1.0, 0.0]
    """

    name: str
    function: PairFunction

    def features(
        self, query: Int[np.ndarray, " pair"], key: Int[np.ndarray, " pair"]
    ) -> Float[np.ndarray, "pair feature"]:
        """φ of each pair; raises where the function returns no [pair, feature] array."""
        found = np.asarray(self.function(query, key), dtype=np.float64)
        if found.ndim != 2 or found.shape[0] != len(query):
            raise ValueError(
                f"the features of encoding {self.name!r} have shape {list(found.shape)} for "
                f"{len(query)} pairs; return an array [pair, feature], with [:, None] where it is "
                "one feature"
            )
        return found

    def kernel(
        self, theta: Float[np.ndarray, " feature"], length: int
    ) -> Float[np.ndarray, "query key"]:
        """s_θ, some queries at a time."""
        found = np.zeros((length, length))
        step = max(1, _CHUNK // (length * max(1, len(theta))))
        for start in range(0, length, step):
            query, key = np.indices((min(step, length - start), length)).reshape(2, -1)
            query, key = query + start, np.minimum(key, query + start)
            rows = self.features(query, key) @ theta
            found[start : start + step] = rows.reshape(-1, length)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class OffsetFeatures(FeatureMap):
    """Features of the offset Δ = i − j alone: a relative encoding.

    >>> ramp = OffsetFeatures(name="ramp", function=lambda offset: -offset[:, None])
    >>> ramp.kernel(np.ones(1), 3)[2].tolist()
    [-2.0, -1.0, 0.0]
    """

    name: str
    function: Callable[[np.ndarray], np.ndarray]
    """From offsets [pair] to features [pair, feature]."""
    nonnegative: bool = False

    def features(
        self, query: Int[np.ndarray, " pair"], key: Int[np.ndarray, " pair"]
    ) -> Float[np.ndarray, "pair feature"]:
        """φ(i − j)."""
        return np.asarray(self.function(query - key), dtype=np.float64)

    def kernel(
        self, theta: Float[np.ndarray, " feature"], length: int
    ) -> Float[np.ndarray, "query key"]:
        """s_θ, from one value an offset."""
        index = np.arange(length)
        by_offset = np.asarray(self.function(index), dtype=np.float64) @ theta
        return np.asarray(by_offset[np.maximum(index[:, None] - index[None, :], 0)])


@dataclass(frozen=True, kw_only=True, eq=False)
class BilinearFeatures(FeatureMap):
    """``x_i ⊗ x_j`` with x = (row of a position table, 1): an absolute encoding.

    The constant stands for the head's biases. ``x_i ⊗ 1`` is left out: it adds one number to a
    query's whole row, which no softmax sees, so its θ is 0.

    >>> BilinearFeatures(name="rows", rows=np.eye(4)).features(np.array([3]), np.array([1])).shape
    (1, 20)
    """

    name: str
    rows: Float[np.ndarray, "pos d_model"]

    def features(
        self, query: Int[np.ndarray, " pair"], key: Int[np.ndarray, " pair"]
    ) -> Float[np.ndarray, "pair feature"]:
        """(row_i, 1) ⊗ row_j, flattened."""
        left = self._with_constant()[query]
        return np.einsum("pa,pb->pab", left, self.rows[key]).reshape(len(query), -1)

    def kernel(
        self, theta: Float[np.ndarray, " feature"], length: int
    ) -> Float[np.ndarray, "query key"]:
        """s_θ as a product of three matrices."""
        form = theta.reshape(self.rows.shape[1] + 1, self.rows.shape[1])
        return np.asarray(self._with_constant()[:length] @ form @ self.rows[:length].T)

    def _with_constant(self) -> np.ndarray:
        return np.concatenate([self.rows, np.ones((len(self.rows), 1))], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class FreeRows(FeatureMap):
    """A learned table with every row trained: rows free to become anything.

    Free rows are as good as orthogonal ones, so this is :class:`BilinearFeatures` of the identity,
    kept sparse: one parameter a pair (i, j) and one a key j. Training shifts the sequence over the
    whole table, so the fit sees the task at every shift.
    """

    name: str = "learned_offset"
    n_rows: int
    every_row_trained: bool = True

    def features(
        self, query: Int[np.ndarray, " pair"], key: Int[np.ndarray, " pair"]
    ) -> sparse.csr_array:
        """One-hot of the pair, then one-hot of the key."""
        pair = np.arange(len(query))
        columns = np.concatenate([query * self.n_rows + key, self.n_rows**2 + key])
        shape = (len(query), self.n_rows * (self.n_rows + 1))
        return sparse.csr_array((np.ones(2 * len(query)), (np.tile(pair, 2), columns)), shape=shape)

    def kernel(
        self, theta: Float[np.ndarray, " feature"], length: int
    ) -> Float[np.ndarray, "query key"]:
        """s_θ: the pair's parameter plus the key's."""
        pairs = theta[: self.n_rows**2].reshape(self.n_rows, self.n_rows)
        return np.asarray(pairs[:length, :length] + theta[self.n_rows**2 :][:length])
