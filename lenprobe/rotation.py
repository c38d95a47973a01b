"""The rotation of RoPE: pair m of a head's dimensions turns by ω_m per position.

Read as a complex number, the pair is multiplied by ``magnitude · exp(i ω_m p)`` at position p, so
``⟨R_i q, R_j k⟩ = magnitude² Re Σ_m conj(q_m) k_m exp(i ω_m (j − i))`` plus the dimensions that do
not turn. Angles are computed in float64 unless the host's own rounding is wanted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Complex, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """How one layer rotates its queries and keys.

    >>> import numpy as np
    >>> turn = Rotation.of(np.array([1.0, 0.01]), adjacent=True)
    >>> np.arange(5)[turn.real], np.arange(5)[turn.imag], turn.unrotated_dims(5)
    (array([0, 2]), array([1, 3]), array([4]))
    """

    frequencies: Float[np.ndarray, " pair"]
    """ω_m in radians a position, float64."""
    adjacent: bool
    """Whether the pairs are (0, 1), (2, 3), ... or half-split ones, (m, m + P)."""
    magnitude: float = 1.0
    """What the tables are multiplied by (YaRN's attention factor)."""

    @classmethod
    def of(
        cls, frequencies: Float[np.ndarray, " pair"], *, adjacent: bool, magnitude: float = 1.0
    ) -> "Rotation":
        """The rotation of adjacent pairs (0, 1), (2, 3), ... or of half-split ones (m, m + P)."""
        return cls(
            frequencies=np.asarray(frequencies, dtype=np.float64),
            adjacent=adjacent,
            magnitude=magnitude,
        )

    @property
    def pairs(self) -> int:
        """How many pairs turn."""
        return len(self.frequencies)

    @property
    def real(self) -> slice:
        """The dimensions that are the pairs' real parts."""
        return slice(0, 2 * self.pairs, 2) if self.adjacent else slice(0, self.pairs)

    @property
    def imag(self) -> slice:
        """The dimensions that are their imaginary parts."""
        return slice(1, 2 * self.pairs, 2) if self.adjacent else slice(self.pairs, 2 * self.pairs)

    def table(
        self, positions: Int[Tensor, " pos"], dtype: torch.dtype, *, exact: bool = True
    ) -> tuple[Float[Tensor, "pos pair"], Float[Tensor, "pos pair"]]:
        """Cosines and sines at the positions, cast to ``dtype``.

        Exact tables turn to the first position once, and from there to the others: the rounding
        of a large angle is then common to all, and angles between positions keep full precision.

        Args:
            positions: any positions, int64.
            dtype: of the tables returned.
            exact: angles in float64; otherwise in float32 as hosts compute them, which loses about
                1e-7 · position of an angle.
        """
        precision = torch.float64 if exact else torch.float32
        omega = torch.from_numpy(self.frequencies).to(positions.device, precision)
        first = positions[:1] if exact else torch.zeros_like(positions[:1])
        angles = (positions - first).to(precision)[:, None] * omega
        turn = torch.polar(torch.full_like(angles, self.magnitude), angles)
        if exact:
            start = first.to(precision)[:, None] * omega
            turn = turn * torch.polar(torch.ones_like(start), start)
        return turn.real.to(dtype), turn.imag.to(dtype)

    def apply(
        self,
        x: Float[Tensor, "batch pos head d_head"],
        positions: Int[Tensor, " pos"],
        *,
        exact: bool = True,
    ) -> Float[Tensor, "batch pos head d_head"]:
        """The vectors turned to their positions, in the dtype of ``x``."""
        cos, sin = self.table(positions, x.dtype, exact=exact)
        cos, sin = (rearrange(t, "pos pair -> 1 pos 1 pair") for t in (cos, sin))
        real, imag = x[..., self.real], x[..., self.imag]
        out = x.clone()
        out[..., self.real] = real * cos - imag * sin
        out[..., self.imag] = imag * cos + real * sin
        return out

    def complex_pairs(
        self, x: Float[np.ndarray, "*any d_head"]
    ) -> Complex[np.ndarray, "*any pair"]:
        """Each pair as one complex number."""
        return x[..., self.real] + 1j * x[..., self.imag]

    def unrotated_dims(self, d_head: int) -> Int[np.ndarray, " dim"]:
        """The dimensions of the head that do not turn."""
        return np.arange(2 * self.pairs, d_head)

    def host_layout(self, table: Float[Tensor, "pos pair"]) -> Float[Tensor, "pos dim"]:
        """A table with one column a rotated dimension, as hosts keep it."""
        pattern = "pos pair -> pos (pair 2)" if self.adjacent else "pos pair -> pos (2 pair)"
        return repeat(table, pattern)
