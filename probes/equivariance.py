"""Does a head's logit depend on the offset alone: equivariance under a shift of all positions.

    E(δ) = max |s(i + δ, j + δ) − s(i, j)| / std(s)      over visible pairs, at fixed contents

*Head level*: the head's own unrotated q and k, rotated at positions shifted by δ.
*End to end*: the same tokens run through the whole model with every position shifted by δ.

Exact for RoPE up to floating point. Float32 tables, as hosts compute them, lose about 1e-7 · δ of
the logits' spread; tables computed in float64 lose nothing, so both are reported, for each dtype.
The measure is taken on logits, never on patterns of a partial prefix: the causal softmax's
denominator knows the absolute position. The claim tested is that of arXiv 2607.18759. Definition:
ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.hosts import Host, cast, host_of, untouched
from lenprobe.reading import (
    LayerReading,
    check_head,
    check_layer,
    check_tokens,
    default_tokens,
    provenance,
    qk_logits,
    read_shifted,
)
from lenprobe.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

DTYPES = ("float64", "float32", "bfloat16", "float16")
TABLES = ("exact", "host")
_SHIFTS = (1, 16, 256, 4096, 65536, 1_000_000)
_TOKENS = 512  # of the default tokens, as many are run: the measure is a maximum, not a mean


@dataclass(frozen=True, kw_only=True, eq=False)
class Equivariance(Result):
    """E(δ) of one head, by tables, dtype and shift."""

    shifts: Int[np.ndarray, " shift"]
    """δ in tokens."""
    dtypes: tuple[str, ...]
    head_level: Float[np.ndarray, "table dtype shift"]
    """Exact tables first, then the host's; NaN for heads that get their position from below."""
    end_to_end: Float[np.ndarray, "table dtype shift"]
    """The same through the whole model."""

    @property
    def errors(self) -> dict[str, float]:
        """The largest E over shifts and levels for each dtype, with float64-computed tables."""
        return self._worst(0)

    @property
    def host_errors(self) -> dict[str, float]:
        """The same with the host's own tables, which lose precision as the position grows."""
        return self._worst(1)

    def _worst(self, table: int) -> dict[str, float]:
        both = np.fmax(self.head_level[table], self.end_to_end[table])
        return {dtype: float(row.max()) for dtype, row in zip(self.dtypes, both, strict=True)}

    def summary(self) -> str:
        """The largest error for each dtype, by tables."""
        lines = [f"equivariance over shifts 1..{self.shifts.max()}, errors in units of std(logits)"]
        for name, errors in (("float64 tables", self.errors), ("host's tables", self.host_errors)):
            lines.append(f"{name}: " + ", ".join(f"{d} {e:.1e}" for d, e in errors.items()))
        return "\n".join(lines)

    def to_frame(self) -> "pd.DataFrame":
        """One row a level, table, dtype and shift."""
        import pandas as pd

        levels = {"head": self.head_level, "end to end": self.end_to_end}
        index = pd.MultiIndex.from_product(
            [levels, TABLES, self.dtypes, self.shifts], names=["level", "tables", "dtype", "shift"]
        )
        return pd.DataFrame(
            {"error": np.stack(list(levels.values())).ravel()}, index=index
        ).reset_index()

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Error against shift, one line a dtype and table, on logarithmic axes."""
        from lenprobe.plots import plot_equivariance

        curves = {
            f"{dtype}, {'float64' if table == 'exact' else 'own'} tables": np.fmax(
                self.head_level[t, d], self.end_to_end[t, d]
            )
            for d, dtype in enumerate(self.dtypes)
            for t, table in enumerate(TABLES)
        }
        return plot_equivariance(self.shifts, curves, ax=ax)


def equivariance_of(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    shifts: Sequence[int] | None = None,
    dtypes: Sequence[str] = DTYPES,
    seed: int = 0,
) -> Equivariance:
    """How far a head's logits change when all positions shift.

    >>> from lenprobe import build, equivariance_of
    >>> result = equivariance_of(build("rope"), 0, 0, shifts=[1, 1000], dtypes=["float64"])
    >>> result.errors["float64"] < 1e-10
    True

    Args:
        model: a HookedTransformer or TransformerBridge.
        layer: 0-based.
        head: 0-based.
        tokens: contents, int64 [batch, pos]; uniform random ones by default.
        shifts: δ in tokens; 1 to 10⁶ by default, or as far as a table of positions reaches.
        dtypes: names among float64, float32, bfloat16, float16. The weights are cast for the run
            and put back, to the bit.
        seed: of the default tokens.

    Raises:
        ValueError: bad layer, head, tokens, shifts or dtypes; positions beyond the model's table.
        lenprobe.reading.UnverifiedReading: the logits cannot be read.
    """
    host = host_of(model)
    layer, head = check_layer(host, layer), check_head(host, head)
    if tokens is None:
        tokens = default_tokens(host, seed)
        tokens = tokens[: max(2, _TOKENS // tokens.shape[1]), : host.n_ctx // 2]
    tokens = check_tokens(host, tokens)
    _check_dtypes(dtypes)
    deltas = _check_shifts(host, shifts, tokens.shape[1])
    head_level = np.full((len(TABLES), len(dtypes), len(deltas)), np.nan)
    end_to_end = head_level.copy()
    with untouched(model):
        base = read_shifted(host, tokens, layer, head, 0)
        for d, dtype in enumerate(getattr(torch, name) for name in dtypes):
            for t, exact in enumerate((True, False)):
                wide = exact or host.tables_exact(dtype)
                head_level[t, d] = _head_level(base, deltas, dtype, exact=wide)
                end_to_end[t, d] = _end_to_end(
                    host, tokens, layer, head, deltas, dtype, exact=exact
                )
    return Equivariance(
        provenance=provenance("equivariance_of", host, base, tokens, seed=seed),
        shifts=deltas,
        dtypes=tuple(dtypes),
        head_level=head_level,
        end_to_end=end_to_end,
    )


def shift_error(
    before: Float[Tensor, "batch query key"], after: Float[Tensor, "batch query key"]
) -> float:
    """Max |after − before| / std(before) over the pairs that are not −inf; 0 for constant logits.

    >>> a = torch.tensor([[[0.0, -torch.inf], [1.0, 2.0]]])
    >>> round(shift_error(a, a + 0.5), 3)
    0.612
    """
    seen = torch.isfinite(before)
    old, new = before[seen].double(), after[seen].double()
    largest = (new - old).abs().max().item()
    spread = old.std(unbiased=False).item()
    return largest / spread if spread > 0 else (0.0 if largest == 0 else math.inf)


def _head_level(
    base: LayerReading, shifts: Int[np.ndarray, " shift"], dtype: torch.dtype, *, exact: bool
) -> Float[np.ndarray, " shift"]:
    """E(δ) of the head's own q and k; NaN where nothing rotates them."""
    if base.q is None or base.k is None or base.rotation is None:
        return np.full(len(shifts), np.nan)
    q, k = base.q.to(dtype), base.k.to(dtype)
    index = torch.arange(q.shape[1], device=q.device)

    def at(shift: int) -> Tensor:
        logits = qk_logits(q, k, base.geometry, index + shift, exact=exact)[:, 0]
        return logits.masked_fill(~base.visible, -math.inf)

    first = at(0)
    return np.array([shift_error(first, at(int(shift))) for shift in shifts])


def _end_to_end(
    host: Host,
    tokens: Tensor,
    layer: int,
    head: int,
    shifts: Int[np.ndarray, " shift"],
    dtype: torch.dtype,
    *,
    exact: bool,
) -> Float[np.ndarray, " shift"]:
    """E(δ) of the same tokens through the whole model."""
    with cast(host.model, dtype):
        first, *rest = (
            read_shifted(host, tokens, layer, head, int(shift), exact=exact).logits[:, 0]
            for shift in (0, *shifts)
        )
    return np.array([shift_error(first, after) for after in rest])


def _check_dtypes(dtypes: Sequence[str]) -> None:
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if isinstance(dtypes, str) or unknown or not dtypes:
        raise ValueError(f"dtypes={dtypes!r}: name one or more of {', '.join(DTYPES)}, in a list")


def _check_shifts(
    host: Host, shifts: Sequence[int] | None, length: int
) -> Int[np.ndarray, " shift"]:
    bounded = host.positions in ("standard", "learned", "learned_offset")
    room = host.n_ctx - length
    if shifts is None:
        wanted = [1, *(2**p for p in range(2, 64) if 2**p < room), room] if bounded else _SHIFTS
        if room < 1 and bounded:
            raise ValueError(
                f"tokens of length {length} fill all n_ctx={host.n_ctx} positions of "
                f"{host.description}, so no shift is possible; pass tokens[:, :{host.n_ctx // 2}]"
            )
        return np.unique(np.array(wanted, dtype=np.int64))
    deltas = np.asarray(list(shifts))
    if deltas.ndim != 1 or len(deltas) == 0 or deltas.dtype.kind not in "iu" or deltas.min() < 0:
        raise ValueError(f"shifts={list(shifts)!r}: pass one or more whole numbers of tokens ≥ 0")
    if bounded:
        host.check_rows(int(deltas.max()), length)
    return deltas.astype(np.int64)
