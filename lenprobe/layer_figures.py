"""All figures of a layer's heads from one reading, for scans: few passes over the n² logits.

The same quantities as those of the probes, one head at a time, arranged so that a scan costs
little more than the forward pass. Some rows of all heads are reduced at a time, so that the passes
over them find them in the cache; what is left is of the size of diagonals, columns and the
sequences' products with each other, added up in float64. Definitions: those of
``probes.decomposition``, ``probes.rule``, ``probes.carrier`` and ``probes.alpha``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lenprobe.probes.decomposition import Design
from lenprobe.reading import LayerReading, RowBlock, qk_logits, row_blocks
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
    sums = _Sums(reading)
    for block in row_blocks(visible, sums.matrices):
        sums.add(block)
    mask = visible.cpu().numpy()
    could = _pairs(mask & (mask.sum(axis=1) > 1)[:, None])
    key = mask.tobytes()
    if key not in designs:
        designs[key] = Design.of(mask)
    shares, variance, relative = _decomposed(sums, designs[key])
    own_rule, carried = _carried(sums.common.cpu().numpy(), train_length, lengths)
    q, k = _means(reading)
    return LayerFigures(
        follow=_follow(sums.choice.cpu().numpy(), mask, could),
        weight=sums.weight.cpu().numpy() / np.maximum(could, 1),
        shares=shares,
        variance=variance,
        relative=relative,
        q=q,
        k=k,
        own_rule=own_rule,
        carried=carried,
        equivariance=_equivariance(reading, len(shares)),
    )


def _means(reading: LayerReading) -> tuple[Any, Any]:
    """Mean q and k of each query head, or None twice where nothing rotates."""
    if reading.rotation is None or reading.queries is None or reading.keys is None:
        return None, None
    both = (reading.queries, reading.keys)
    q, k = (x.mean(dim=(0, 1), dtype=torch.float64).cpu().numpy() for x in both)
    return q, np.repeat(k, len(q) // len(k), axis=0)


class _Sums:
    """What one walk over the logits and the pattern leaves."""

    def __init__(self, reading: LayerReading) -> None:
        self.reading = reading
        batch, heads, n, _ = reading.scores.shape
        self.matrices = batch * heads
        dtype = torch.promote_types(reading.scores.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=reading.scores.device)
        self._room = self._above_room = like
        self._order = torch.stack([torch.ones(n), torch.arange(n)], dim=-1).to(like)
        self._count = reading.visible.sum(dim=-1).to(like)
        self.choice = like.new_full((heads, batch, n), -1, dtype=torch.int64)
        """The key of the largest logit; −1 where several share it."""
        self.common = like.new_full((heads, n), -1, dtype=torch.int64)
        """The key of the largest mean logit over the batch, by α's rule for ties."""
        self.products = like.new_zeros(heads, batch, batch, dtype=torch.float64)
        """Of the row-centred logits of every two sequences."""
        self.sums = like.new_zeros(heads, batch, 3 * n - 1, dtype=torch.float64)
        """Of the row-centred logits at each offset −(n − 1) .. n − 1, then on each key."""
        self.weight = like.new_zeros(heads, 3 * n - 1, dtype=torch.float64)
        """The same of the mean pattern of the queries that have a choice."""

    def add(self, block: RowBlock) -> None:
        """Adds some rows."""
        scores, pattern = (
            x[:, :, block.rows, block.keys].movedim(0, 1)
            for x in (self.reading.scores, self.reading.pattern)
        )
        x = self._skewed(scores.shape).copy_(scores)
        count = self._count[block.rows, None]
        block.fill(x, -math.inf)
        self.choice[:, :, block.rows] = self._above(x, x.amax(dim=-1), block.keys)
        block.fill(x, 0.0)
        x -= x.sum(dim=-1, keepdim=True) / count.clamp(min=1)
        block.fill(x, 0.0)
        flat = self._flat(x)
        self.products += flat @ flat.mT
        self._add(self.sums, x, block)
        mean = x.mean(dim=1)
        block.fill(mean, math.inf)
        low = mean.amin(dim=-1)
        block.fill(mean, -math.inf)
        top = mean.amax(dim=-1)
        self.common[:, block.rows] = self._above(mean, top - TIE * (top - low), block.keys)
        y = x[:, 0].copy_(pattern.sum(dim=1, dtype=x.dtype)).mul_((count > 1) / x.shape[1])
        self._add(self.weight, y, block)

    def _skewed(self, shape: tuple[int, ...]) -> Float[Tensor, "head batch row key"]:
        """Room, with zeros around it, in which a diagonal of the rows is a column.

        With r rows of w keys in rows of s = r + w − 1 numbers, row i begins at r − 1 − i.
        """
        heads, batch, rows, width = shape
        size = rows * (rows + width - 1)
        if self._room.numel() < heads * batch * size:
            self._room = self._room.new_empty(heads * batch * size)
            self._above_room = torch.empty_like(self._room)
        room = self._room[: heads * batch * size].zero_()
        return room.as_strided(shape, (batch * size, size, rows + width - 2, 1), rows - 1)

    @staticmethod
    def _flat(x: Float[Tensor, "*any row key"]) -> Float[Tensor, "*any number"]:
        """All of the room that each matrix of :meth:`_skewed` has, zeros included."""
        rows, width = x.shape[-2:]
        size = rows * (rows + width - 1)
        return x.as_strided((*x.shape[:-2], size), (*x.stride()[:-2], 1), 0)

    def _add(self, total: Tensor, x: Float[Tensor, "*any row key"], block: RowBlock) -> None:
        """Adds sums by offset and by key to a total."""
        rows, width = x.shape[-2:]
        n = self._count.shape[0]
        first = block.rows.start - block.keys.start - (width - 1) + n - 1
        by_offset = self._flat(x).unflatten(-1, (rows, rows + width - 1)).sum(dim=-2).flip(-1)
        total[..., first : first + rows + width - 1] += by_offset
        total[..., 2 * n - 1 :][..., block.keys] += x.sum(dim=-2)

    def _above(
        self, x: Float[Tensor, "*any row key"], least: Float[Tensor, "*any row"], keys: slice
    ) -> Int[Tensor, "*any row"]:
        """The only key of each row whose number is so large; −1 where there are several.

        By passes that use vector instructions, which an argmax does not.
        """
        above = self._above_room[: x.numel()].view(x.shape)
        torch.ge(x, least[..., None], out=above)
        times, place = (above.flatten(0, -2) @ self._order[keys]).view(*x.shape[:-1], 2).unbind(-1)
        return torch.where(times == 1, place, -1).long()


def _follow(
    choice: Int[np.ndarray, "head batch query"],
    mask: Bool[np.ndarray, "query key"],
    could: Int[np.ndarray, " rule"],
) -> Float[np.ndarray, "head rule"]:
    """Shares of offsets −(n − 1) .. n − 1 and of slots; query 0 of a causal head has no choice."""
    heads, batch, n = choice.shape
    free = (choice >= 0) & (mask.sum(axis=1) > 1)
    offset = np.where(free, np.arange(n) - choice + n - 1, -1)
    slot = np.where(free, choice + 2 * n - 1, -1)
    both = np.concatenate([offset, slot], axis=-1).reshape(heads, -1)
    row = np.repeat(np.arange(heads), both.shape[1]).reshape(both.shape)
    index = (row * (3 * n - 1) + both)[both >= 0]
    counts = np.bincount(index, minlength=heads * (3 * n - 1)).reshape(heads, 3 * n - 1)
    enough = could >= min(_POSITIONS, n - 1)
    return np.where(enough, counts / (batch * np.maximum(could, 1)), 0.0)


def _pairs(mask: Bool[np.ndarray, "query key"]) -> Int[np.ndarray, " rule"]:
    """How many queries can follow each offset, then each slot."""
    n = len(mask)
    query, key = np.nonzero(mask)
    offsets = np.bincount(query - key + n - 1, minlength=2 * n - 1)
    return np.concatenate([offsets, mask.sum(axis=0)])


def _decomposed(
    found: _Sums, design: Design
) -> tuple[
    Float[np.ndarray, "head part"], Float[np.ndarray, " head"], Float[np.ndarray, "head offset"]
]:
    """Shares, variance and r."""
    heads, batch, columns = found.sums.shape
    n = (columns + 1) // 3
    split = len(design.offsets)
    every = found.sums.cpu().numpy()
    sums = np.concatenate([every[..., design.offsets + n - 1], every[..., 2 * n - 1 :]], axis=-1)
    relative, absolute = design.solve(sums)
    products = found.products.cpu().numpy()
    energy = np.einsum("hbb->h", products)
    positional = (products.sum(axis=(1, 2)) - energy) / (batch * (batch - 1))
    total = energy / batch
    along = _across(relative, sums[..., :split])
    over = _across(absolute, sums[..., split:])
    named = np.array([along, over, positional - along - over, total - positional])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(total > 0, named / total, 0.0).T
    by_offset = np.full((heads, n), np.nan)
    behind = design.offsets >= 0
    by_offset[:, design.offsets[behind]] = relative.mean(axis=1)[:, behind]
    return shares, total / design.pairs, by_offset


def _across(
    left: Float[np.ndarray, "head batch column"], right: Float[np.ndarray, "head batch column"]
) -> Float[np.ndarray, " head"]:
    """Mean product of two different sequences."""
    batch = left.shape[1]
    every = (left.sum(axis=1) * right.sum(axis=1)).sum(axis=-1)
    same = np.einsum("hbc,hbc->h", left, right)
    return np.asarray((every - same) / (batch * (batch - 1)))


def _carried(
    argmax: Int[np.ndarray, "head query"], train_length: int, lengths: Int[np.ndarray, " length"]
) -> tuple[Int[np.ndarray, "head two"], Float[np.ndarray, "head length"]]:
    """Each head's own rule on the short grid, and how far its kernel carries it."""
    heads, n = argmax.shape
    query = np.arange(n)
    short = slice(1, train_length)
    rules = np.zeros((heads, 2), dtype=np.int64)
    carried = np.zeros((heads, len(lengths)))
    for head, chosen in enumerate(argmax):
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


def _equivariance(reading: LayerReading, heads: int) -> Float[np.ndarray, " head"]:
    if reading.rotation is None or reading.queries is None or reading.keys is None:
        return np.full(heads, np.nan)
    q, k = (x[:1, :_SHIFTED].float() for x in (reading.queries, reading.keys))
    index = torch.arange(q.shape[1], device=q.device)
    before, after = (
        qk_logits(q, k, reading.geometry, index + shift)[0].double() for shift in (0, _SHIFT)
    )
    seen = reading.visible[: len(index), : len(index)]
    largest = (after - before).abs().masked_fill(~seen, 0.0).amax(dim=(-2, -1))
    spread = before[:, seen].std(dim=-1, unbiased=False)
    found = torch.where(spread > 0, largest / spread, torch.nan)
    return found.cpu().numpy()
