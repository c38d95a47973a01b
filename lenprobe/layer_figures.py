"""All figures of a layer's heads from one reading, for scans: few passes over the n² logits.

The same quantities as those of the probes, one head at a time, arranged so that a scan costs
little more than the forward pass: every pass over [batch, head, query, key] is one tensor
operation over all heads, what is left is of the size of diagonals, columns and means over the
batch. Sums are taken in float64. Definitions: those of ``probes.decomposition``, ``probes.rule``,
``probes.carrier`` and ``probes.alpha``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lenprobe.probes.decomposition import Design
from lenprobe.reading import BLOCK, LayerReading, qk_logits
from lenprobe.realize import TIE

_POSITIONS = 4  # a rule that fewer positions can follow gets no share, as in probes.rule
_SHIFT, _SHIFTED = 4096, 64  # of the equivariance figure: δ, and positions compared


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerFigures:
    """What is kept of one layer on one batch."""

    follow: Float[np.ndarray, "head rule"]
    """Share of the queries that choose each offset −(n − 1) .. n − 1, then each slot."""
    weight: Float[np.ndarray, "head rule"]
    """Mean attention weight there, over the queries that have it."""
    shares: Float[np.ndarray, "head part"]
    """Relative, absolute, other positional, content, as in ``probes.decomposition``."""
    variance: Float[np.ndarray, " head"]
    """Mean square of the row-centred logits."""
    relative: Float[np.ndarray, "head offset"]
    """r(Δ) at Δ = 0 .. n − 1."""
    q: Float[np.ndarray, "head d_head"] | None
    k: Float[np.ndarray, "head d_head"] | None
    """Means over batch and positions, before the rotation; None where nothing rotates."""
    own_rule: Int[np.ndarray, "head two"]
    """The rule of the kernel on the short grid: 0 for an offset or 1 for a slot, and which."""
    carried: Float[np.ndarray, "head length"]
    """α: share of the new queries whose unique argmax of the kernel follows it."""
    equivariance: Float[np.ndarray, " head"]
    """E at δ = 4096 of the head's own q and k in float32; NaN where nothing rotates."""


def figures_of(
    reading: LayerReading,
    *,
    train_length: int,
    lengths: Int[np.ndarray, " length"],
    designs: dict[bytes, Design],
) -> LayerFigures:
    """The figures of every head of a layer.

    Args:
        reading: all heads of a layer, on at least two sequences.
        train_length: the short grid that each head's own rule is read off.
        lengths: beyond it, where α is judged.
        designs: least-squares problems by mask; layers of one mask share theirs.
    """
    visible = reading.visible
    causal = not bool(visible.triu(1).any())
    sums = _sums_of(reading, visible, causal)
    follow = _follow(sums.choice, visible)
    weight = _weights(sums.pattern, visible, causal)
    mask = visible.cpu().numpy()
    key = mask.tobytes()
    if key not in designs:
        designs[key] = Design.of(mask)
    shares, variance, relative = _decomposed(sums, designs[key], causal)
    own_rule, carried = _carried(sums.kernel, visible, train_length, lengths)
    rotates = reading.rotation is not None and reading.q is not None and reading.k is not None
    return LayerFigures(
        follow=follow,
        weight=weight,
        shares=shares,
        variance=variance,
        relative=relative,
        q=_mean(reading.q) if rotates else None,
        k=_mean(reading.k) if rotates else None,
        own_rule=own_rule,
        carried=carried,
        equivariance=_equivariance(reading, causal) if rotates else np.full(len(shares), np.nan),
    )


def _mean(x: Tensor | None) -> Float[np.ndarray, "head d_head"]:
    assert x is not None  # the layer rotates, so both are there
    return x.mean(dim=(0, 1)).cpu().numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sums:
    """What one walk over the logits and the pattern leaves."""

    choice: Int[np.ndarray, "batch head query"]
    """The key of the largest logit; −1 where several share it."""
    energy: Float[np.ndarray, "batch head"]
    """Sum of the squares of the row-centred logits."""
    diagonals: Float[np.ndarray, "batch head offset"]
    columns: Float[np.ndarray, "batch head key"]
    """Sums of the row-centred logits along each diagonal, and over each key."""
    kernel: Float[Tensor, "head query key"]
    """Mean of the row-centred logits over the batch."""
    pattern: Float[Tensor, "head query key"]
    """Mean pattern over the batch."""


def _sums_of(reading: LayerReading, visible: Bool[Tensor, "query key"], causal: bool) -> _Sums:
    """Some heads of one sequence at a time, so that each pass finds them in the cache."""
    logits, pattern = reading.logits, reading.pattern
    batch, heads, n, _ = logits.shape
    count = visible.sum(dim=-1).clamp(min=1)
    hidden = ~visible
    offsets = n if causal else 2 * n - 1
    wide: Any = {"dtype": torch.float64, "device": logits.device}
    at = torch.empty(batch, heads, n, dtype=torch.int64, device=logits.device)
    energy = torch.empty(batch, heads, **wide)
    diagonals, columns = (torch.empty(batch, heads, k, **wide) for k in (offsets, n))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    kernel, mean = (torch.zeros(heads, n, n, dtype=dtype, device=logits.device) for _ in range(2))
    step = max(1, BLOCK // n**2)
    for b in range(batch):
        for some in (slice(h, h + step) for h in range(0, heads, step)):
            part = logits[b, some].to(dtype, copy=True)
            top, best = part.max(dim=-1)
            part.scatter_(-1, best[..., None], -math.inf)
            at[b, some] = torch.where(top > part.amax(dim=-1), best, -1)
            part.scatter_(-1, best[..., None], top[..., None])
            part.masked_fill_(hidden, 0.0)
            part -= (part.sum(dim=-1) / count)[..., None]
            part *= visible
            energy[b, some] = torch.linalg.vector_norm(part, dim=(-2, -1), dtype=torch.float64) ** 2
            kernel[some] += part
            mean[some] += pattern[b, some]
            diagonals[b, some] = _diagonal_sums(part, causal).double()
            columns[b, some] = part.sum(dim=-2).double()
    return _Sums(
        choice=at.cpu().numpy(),
        energy=energy.cpu().numpy(),
        diagonals=diagonals.cpu().numpy(),
        columns=columns.cpu().numpy(),
        kernel=kernel / batch,
        pattern=mean / batch,
    )


def _follow(
    choice: Int[np.ndarray, "batch head query"], visible: Bool[Tensor, "query key"]
) -> Float[np.ndarray, "head rule"]:
    """Shares of offsets −(n − 1) .. n − 1 and of slots; query 0 of a causal head has no choice."""
    batch, heads, n = choice.shape
    free = (visible.sum(dim=-1) > 1).cpu().numpy()
    mask = visible.cpu().numpy() & free[:, None]
    query = np.arange(n)
    offset = np.where((choice >= 0) & free, query - choice + n - 1, -1)
    slot = np.where((choice >= 0) & free, choice + 2 * n - 1, -1)
    both = np.concatenate([offset, slot], axis=-1).transpose(1, 0, 2).reshape(heads, -1)
    row = np.repeat(np.arange(heads), both.shape[1]).reshape(both.shape)
    index = (row * (3 * n - 1) + both)[both >= 0]
    counts = np.bincount(index, minlength=heads * (3 * n - 1)).reshape(heads, 3 * n - 1)
    could = _pairs(mask)
    enough = could >= min(_POSITIONS, n - 1)
    return np.where(enough, counts / (batch * np.maximum(could, 1)), 0.0)


def _pairs(mask: Bool[np.ndarray, "query key"]) -> Int[np.ndarray, " rule"]:
    """How many queries can follow each offset, then each slot."""
    n = len(mask)
    query, key = np.nonzero(mask)
    offsets = np.bincount(query - key + n - 1, minlength=2 * n - 1)
    return np.concatenate([offsets, mask.sum(axis=0)])


def _weights(
    pattern: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], causal: bool
) -> Float[np.ndarray, "head rule"]:
    free = visible.sum(dim=-1) > 1
    kept = pattern * free[:, None]
    sums = torch.cat([_signed(_diagonal_sums(kept, causal), causal), kept.sum(dim=-2)], dim=-1)
    could = _pairs((visible & free[:, None]).cpu().numpy())
    return sums.cpu().numpy() / np.maximum(could, 1)


def _signed(sums: Float[Tensor, "*any offset"], causal: bool) -> Float[Tensor, "*any signed"]:
    """Sums by Δ = −(n − 1) .. n − 1, zeros where a causal head sees nothing."""
    if not causal:
        return sums
    return torch.nn.functional.pad(sums, (sums.shape[-1] - 1, 0))


def _diagonal_sums(
    x: Float[Tensor, "*any query key"], causal: bool
) -> Float[Tensor, "*any offset"]:
    """Sums along the diagonals Δ = i − j: 0 .. n − 1, or −(n − 1) .. n − 1 where not causal.

    A causal matrix is zero above its diagonal, so that rows shifted against each other can be
    read out of it as it lies in memory: element i(n + 1) − Δ is (i, i − Δ), or such a zero.
    """
    n = x.shape[-1]
    if not causal:
        reach = range(-(n - 1), n)
        return torch.stack([x.diagonal(-o, dim1=-2, dim2=-1).sum(dim=-1) for o in reach], dim=-1)
    x = x.contiguous()
    rows = x.as_strided((x.numel() // (n * n), n - 1, n), (n * n, n + 1, 1), x.storage_offset() + 2)
    sums = rows.sum(dim=1).flip(-1).view(*x.shape[:-2], n)
    sums[..., 0] += x[..., 0, 0]
    return sums


def _decomposed(
    found: _Sums, design: Design, causal: bool
) -> tuple[
    Float[np.ndarray, "head part"], Float[np.ndarray, " head"], Float[np.ndarray, "head offset"]
]:
    """Shares, variance and r."""
    batch, _, n = found.columns.shape
    common = torch.linalg.vector_norm(found.kernel, dim=(-2, -1), dtype=torch.float64) ** 2
    seen = design.offsets if causal else design.offsets + n - 1
    sums = np.concatenate([found.diagonals[..., seen], found.columns], axis=-1)
    split = len(design.offsets)
    relative, absolute = design.solve(sums.reshape(-1, sums.shape[-1]))
    relative, absolute = (x.reshape(*sums.shape[:2], -1) for x in (relative, absolute))
    both = batch * (batch - 1)
    positional = (batch**2 * common.cpu().numpy() - found.energy.sum(axis=0)) / both
    total = found.energy.mean(axis=0)
    along = _across(relative, sums[..., :split])
    over = _across(absolute, sums[..., split:])
    named = np.array([along, over, positional - along - over, total - positional])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(total > 0, named / total, 0.0).T
    by_offset = np.full((len(total), n), np.nan)
    behind = design.offsets >= 0
    by_offset[:, design.offsets[behind]] = relative.mean(axis=0)[:, behind]
    return shares, total / design.pairs, by_offset


def _across(
    left: Float[np.ndarray, "batch head column"], right: Float[np.ndarray, "batch head column"]
) -> Float[np.ndarray, " head"]:
    """Mean product of two different sequences."""
    batch = len(left)
    every = np.einsum("bhc,dhc->h", left, right, optimize=True)
    same = np.einsum("bhc,bhc->h", left, right)
    return np.asarray((every - same) / (batch * (batch - 1)))


def _carried(
    kernel: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    train_length: int,
    lengths: Int[np.ndarray, " length"],
) -> tuple[Int[np.ndarray, "head two"], Float[np.ndarray, "head length"]]:
    """Each head's own rule on the short grid, and how far its kernel carries it."""
    heads, n, _ = kernel.shape
    seen = kernel.masked_fill(~visible, -math.inf)
    low = kernel.masked_fill(~visible, math.inf).amin(dim=-1)
    top, at = seen.max(dim=-1)
    seen.scatter_(-1, at[..., None], -math.inf)
    unique = (top - seen.amax(dim=-1)) > TIE * (top - low)
    argmax = torch.where(unique, at, -1).cpu().numpy()
    query = np.arange(n)
    short = slice(1, train_length)
    rules = np.zeros((heads, 2), dtype=np.int64)
    carried = np.zeros((heads, len(lengths)))
    for head in range(heads):
        chosen = argmax[head]
        back, slots = (query - chosen)[short], chosen[short]
        clear = chosen[short] >= 0
        offsets = np.bincount(back[clear & (back >= 0)], minlength=1)
        counts = np.bincount(slots[clear], minlength=1)
        kind = int(counts.max() > offsets.max())
        number = int((counts if kind else offsets).argmax())
        rules[head] = kind, number
        wanted = np.full(n, number) if kind else query - number
        hit = (chosen == wanted) & (chosen >= 0)
        for place, length in enumerate(lengths):
            new = query[train_length:length]
            carried[head, place] = hit[new[wanted[new] >= 0]].mean()
    return rules, carried


def _equivariance(reading: LayerReading, causal: bool) -> Float[np.ndarray, " head"]:
    assert reading.q is not None and reading.k is not None  # the layer rotates
    q, k = (x[:1, :_SHIFTED].float() for x in (reading.q, reading.k))
    index = torch.arange(q.shape[1], device=q.device)
    before, after = (
        qk_logits(q, k, reading.geometry, index + shift)[0].double() for shift in (0, _SHIFT)
    )
    seen = reading.visible[: len(index), : len(index)]
    largest = (after - before).abs().masked_fill(~seen, 0.0).amax(dim=(-2, -1))
    spread = before[:, seen].std(dim=-1, unbiased=False)
    found = torch.where(spread > 0, largest / spread, torch.nan)
    return found.cpu().numpy()
