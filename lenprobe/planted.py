"""Heads whose rule is known, because their weights were set by hand.

A probe is trusted as far as it returns the truth on heads where the truth is known. Each function
here builds a small model with one rule and returns it with that rule as data:

- a RoPE head that attends to the offset d, by a carrier planted in b_Q and b_K (W_Q = W_K = 0);
- the same with a side lobe, which takes over at an offset of your choice;
- a head that is pinned to an absolute slot, in a learned table;
- a head that matches contents: keys that hold the query's token or its partner, or that follow an
  earlier copy of it;
- a mixture of a carrier and a content match, in shares that can be computed;
- uniform heads and random heads, on which no probe may find anything.

The residual stream has one block of coordinates a layer beside the tokens' own, so that the output
is exactly the attention mass on each token, and a last coordinate that flags the slot. Weights are
float64 by default: what is planted then holds to rounding. On TransformerLens 4.x the rotary and
learned heads are native bridges; ``random_head`` of other encodings needs 3.9. Definition: ours.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lenprobe.weights import set_weights, weights_of

Kind = Literal["offset", "slot", "content", "mixture", "uniform", "random"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """What a planted head does, as data."""

    kind: Kind
    offset: int | None = None
    """The offset attended to."""
    slot: int | None = None
    """The absolute key attended to."""
    horizon: float = math.inf
    """First offset beyond the training length at which a side lobe wins."""
    train_length: int | None = None
    relative: Float[np.ndarray, " offset"] | None = None
    """Mean logit as a function of the offset, for offsets 0 .. n_ctx − 1."""
    absolute: Float[np.ndarray, " key"] | None = None
    """Mean logit as a function of the key's position."""
    content_variance: float = 0.0
    """Of the logit of a pair at Δ ≥ 1; independent between the keys of a query."""

    def shares(self, length: int) -> Float[np.ndarray, " part"]:
        """Relative, absolute, other positional and content share at a length, by definition.

        >>> pin(slot=2).truth.shares(64).round(2).tolist()
        [0.02, 0.98, 0.0, 0.0]

        Raises:
            ValueError: the shares of this kind of head are not known, or not at this length.
        """
        if self.relative is None or self.absolute is None:
            raise ValueError(f"the shares of a head of kind {self.kind!r} are not known by plan")
        if not 3 <= length <= len(self.relative):
            raise ValueError(f"length={length}: take one in 3..{len(self.relative)} (n_ctx)")
        index = np.arange(length)
        line = index - index.mean()
        slope = (line @ self.absolute[:length]) / (line @ line)
        # a shared linear trend is the relative part's: slope · j = row(i) − slope · Δ
        kernels = [
            (self.relative[:length] - slope * index)[np.abs(index[:, None] - index)],
            np.tile(self.absolute[:length] - slope * line, (length, 1)),
        ]
        visible = np.tril(np.ones((length, length), dtype=bool))
        count = (index + 1)[:, None]
        relative, absolute = (
            np.where(visible, x - np.where(visible, x, 0).sum(1, keepdims=True) / count, 0)
            for x in kernels
        )
        mean = relative + absolute
        content = self.content_variance * (index**2 / (index + 1)).sum()
        parts = np.array([np.sum(relative * mean), np.sum(absolute * mean), 0.0, content])
        total = parts.sum()
        return parts / total if total > 0 else parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """A model and what is true of its head."""

    model: Any
    truth: Truth
    layer: int = 0
    head: int = 0


def carrier(
    offset: int,
    *,
    margin: float = 8.0,
    d_head: int = 32,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    train_length: int | None = None,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A RoPE head that attends to the key ``offset`` positions back: g(Δ) = A Σ_m cos ω_m(Δ − d).

    Every pair is in phase at d and nowhere else, so the peak is d at any length and there is no
    horizon.

    >>> carrier(3).truth.offset
    3

    Args:
        offset: d, 0 ≤ d < train_length.
        margin: g(d) minus the carrier's largest value at any other trained offset, in nats.
        d_head: width of the head, even.
        base: of the rotary frequencies ω_m = base^(−2m/rotary_dim).
        rotary_dim: how many of the head's dimensions turn; all by default.
        train_length: what the model says it was trained on; max(16, d + 8) by default.
        n_ctx: longest sequence.
        d_vocab: how many tokens; min(16, d_head) by default.
        dtype: of the weights.

    Raises:
        ValueError: an offset outside the range, a width that is odd or too small.
    """
    shape = _Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length or max(16, offset + 8))
    _check_offset("offset", offset, 0, shape.train_length)
    waves = np.exp(1j * shape.frequencies * offset)
    waves = waves * _scale_for(waves, shape, offset, margin)
    return _plant_carrier(shape, waves, dtype, Truth(kind="offset", offset=offset))


def side_lobe(
    offset: int,
    lobe: int,
    *,
    margin: float = 8.0,
    d_head: int = 32,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    train_length: int | None = None,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A RoPE head that attends to ``offset`` until the offset ``lobe`` exists, where a lobe wins.

    Of all carriers these frequencies can make, the one whose target stands highest above every
    other offset below the lobe, while the lobe stands a tenth of that above the target: a linear
    programme in the amplitudes.

    >>> side_lobe(3, lobe=100).truth.horizon
    100.0

    Args:
        offset: d, 0 ≤ d < train_length.
        lobe: the first offset at which g(Δ) ≥ g(d); train_length ≤ lobe < n_ctx.
        margin: g(d) minus the carrier's largest value at any other offset below the lobe, in nats.
        d_head: width of the head, even.
        base: of the rotary frequencies.
        rotary_dim: how many of the head's dimensions turn; all by default.
        train_length: what the model says it was trained on; max(16, d + 8) by default.
        n_ctx: longest sequence.
        d_vocab: how many tokens; min(16, d_head) by default.
        dtype: of the weights.

    Raises:
        ValueError: offsets outside their range, or a lobe that no carrier of these frequencies has.
    """
    shape = _Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length or max(16, offset + 8))
    _check_offset("offset", offset, 0, shape.train_length)
    _check_offset("lobe", lobe, shape.train_length, n_ctx)
    waves = _lobed(shape.frequencies, offset, lobe)
    if waves is None:
        raise ValueError(
            f"no carrier with {len(shape.frequencies)} frequencies of base={base:g} peaks at "
            f"offset={offset} and first returns at lobe={lobe}; take a wider head, a smaller base "
            "or another lobe"
        )
    waves = waves * _scale_for(waves, replace(shape, train_length=lobe), offset, margin)
    truth = Truth(kind="offset", offset=offset, horizon=float(lobe))
    return _plant_carrier(shape, waves, dtype, truth)


def pin(
    slot: int,
    *,
    strength: float = 12.0,
    d_head: int = 32,
    train_length: int = 16,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A head on a learned table that attends to the key at position ``slot``, from every query.

    >>> pin(5).truth.slot
    5

    Args:
        slot: p, 0 ≤ p < train_length.
        strength: logit of the slot; all other keys have 0.
        d_head: width of the head.
        train_length: what the model says it was trained on.
        n_ctx: rows of the table.
        d_vocab: how many tokens; min(16, d_head) by default.
        dtype: of the weights.
    """
    shape = _Shape.of(d_head, 10000.0, None, n_ctx, d_vocab, train_length)
    _check_offset("slot", slot, 0, train_length)
    model, tables = _blank("learned", shape, n_layers=1, dtype=dtype)
    tables["pos_embed.W_pos"][slot, -1] = 1.0
    tables["blocks.0.attn.W_K"][0, -1, 0] = 1.0
    tables["blocks.0.attn.b_Q"][0, 0] = strength * math.sqrt(d_head)
    _copy_out(tables, shape, layer=0)
    absolute = np.zeros(n_ctx)
    absolute[slot] = strength
    truth = Truth(
        kind="slot",
        slot=slot,
        train_length=train_length,
        relative=np.zeros(n_ctx),
        absolute=absolute,
    )
    return Planted(model=_write(model, tables), truth=truth)


def content_match(
    *,
    partner: int = 0,
    strength: float = 12.0,
    d_head: int = 32,
    train_length: int = 16,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A head that attends to keys by their token: those that hold the query's, or its partner.

    Positions play no part but one: a query always matches itself where ``partner`` is 0.

    >>> content_match(partner=1).truth.kind
    'content'

    Args:
        partner: keys with the token t + partner (modulo the vocabulary) match a query with t.
        strength: logit of a match; all other keys have 0.
        d_head: width of the head; two of its dimensions turn and stay empty.
        train_length: what the model says it was trained on.
        n_ctx: longest sequence.
        d_vocab: how many tokens; min(16, d_head − 2) by default.
        dtype: of the weights.
    """
    vocabulary = min(16, d_head - 2) if d_vocab is None else d_vocab
    shape = _Shape.of(d_head, 10000.0, 2, n_ctx, vocabulary, train_length)
    return _plant_mixture(shape, np.zeros(1, complex), strength, partner, dtype, "content", None)


def induction(
    *,
    strength: float = 12.0,
    d_head: int = 32,
    train_length: int = 16,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A head in layer 1 that attends to the keys that follow an earlier copy of the query's token.

    Layer 0 is a carrier at offset 1, which writes each token's predecessor beside it.

    >>> induction().layer
    1

    Args:
        strength: logit of a match; all other keys have 0.
        d_head: width of the heads.
        train_length: what the model says it was trained on.
        n_ctx: longest sequence.
        d_vocab: how many tokens; min(16, d_head − 2) by default.
        dtype: of the weights.
    """
    vocabulary = min(16, d_head - 2) if d_vocab is None else d_vocab
    shape = _Shape.of(d_head, 10000.0, 2, n_ctx, vocabulary, train_length)
    model, tables = _blank("rope", shape, n_layers=2, dtype=dtype)
    # one pair cannot tell offset 1 from 1 + 2π k closely, so layer 0 says 40 nats a unit of cosine
    _bias(tables, 0, 60.0 * np.exp(1j * shape.frequencies), shape)
    _match(tables, 1, shape, strength, partner=0, key_block=1)
    for layer in range(2):
        _copy_out(tables, shape, layer=layer)
    truth = Truth(kind="content", train_length=train_length)
    return Planted(model=_write(model, tables), truth=truth, layer=1)


def mixture(
    weight: float,
    offset: int = 3,
    *,
    spread: float = 2.0,
    partner: int = 1,
    d_head: int = 64,
    base: float = 10000.0,
    train_length: int = 64,
    n_ctx: int = 256,
    d_vocab: int = 16,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A head whose logits are λ · position + (1 − λ) · content, the two equal in spread at λ = ½.

    Position is a carrier at ``offset`` in the dimensions that turn, content a match of tokens in
    those that do not. Both are scaled to the same row-centred variance at the training length, so
    that the positional share there is close to λ² / (λ² + (1 − λ)²); ``truth.shares`` has it
    exactly.

    >>> [round(float(mixture(w).truth.shares(64)[0]), 2) for w in (0.0, 0.5, 1.0)]
    [0.0, 0.5, 1.0]

    Args:
        weight: λ in [0, 1].
        offset: of the carrier.
        spread: standard deviation in nats of either part alone at the training length.
        partner: keys with the token t + partner match a query with t; 0 makes each query match
            itself, which is relative position.
        d_head: width of the head; d_head − d_vocab of its dimensions turn.
        base: of the rotary frequencies.
        train_length: where the two parts have equal variance.
        n_ctx: longest sequence.
        d_vocab: how many tokens.
        dtype: of the weights.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight} is not a share; take one in [0, 1]")
    rotary_dim = 2 * ((d_head - d_vocab) // 2)
    if rotary_dim < 2:
        raise ValueError(
            f"d_head={d_head} leaves no dimension to turn beside d_vocab={d_vocab} tokens; take "
            f"d_head ≥ {d_vocab + 2}"
        )
    shape = _Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length)
    _check_offset("offset", offset, 0, train_length)
    waves = np.exp(1j * shape.frequencies * offset)
    position = _spread(
        Truth(kind="offset", relative=_kernel(waves, shape), absolute=np.zeros(n_ctx)), shape
    )
    match = math.sqrt((1 / d_vocab) * (1 - 1 / d_vocab) * _free_share(train_length))
    return _plant_mixture(
        shape,
        waves * weight * spread / position,
        (1 - weight) * spread / match,
        partner,
        dtype,
        "mixture",
        offset,
    )


def uniform(
    *,
    encoding: Literal["rope", "learned"] = "rope",
    d_head: int = 32,
    train_length: int = 16,
    n_ctx: int = 256,
    d_vocab: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """A head whose logits are all 0: it attends to everything alike.

    >>> uniform().truth.kind
    'uniform'
    """
    shape = _Shape.of(d_head, 10000.0, None, n_ctx, d_vocab, train_length)
    model, tables = _blank(encoding, shape, n_layers=1, dtype=dtype)
    _copy_out(tables, shape, layer=0)
    zero = np.zeros(n_ctx)
    truth = Truth(kind="uniform", train_length=train_length, relative=zero, absolute=zero)
    return Planted(model=_write(model, tables), truth=truth)


def random_head(
    encoding: str = "rope",
    *,
    gain: float = 1.0,
    n_heads: int = 1,
    d_model: int = 32,
    d_head: int | None = None,
    train_length: int = 16,
    n_ctx: int = 256,
    d_vocab: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Planted:
    """A head as training finds it: random weights, of any encoding.

    >>> random_head(seed=1).truth.kind
    'random'

    Args:
        encoding: a name of ``lenprobe.encodings``.
        gain: multiplies W_Q, and so the logits; random heads are close to uniform at 1.
        n_heads: how many heads; each is as random as the first.
        d_model: width of the residual stream.
        d_head: width of the heads; d_model / n_heads by default.
        train_length: what the model says it was trained on.
        n_ctx: longest sequence.
        d_vocab: how many tokens.
        dtype: of the weights.
        seed: of the weights.
    """
    from lenprobe.models import build

    model = build(
        encoding,
        n_heads=n_heads,
        d_model=d_model,
        d_head=d_head,
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        dtype=dtype,
        seed=seed,
    )
    weights = weights_of(model)
    set_weights(model, {n: w * gain if n.endswith("attn.W_Q") else w for n, w in weights.items()})
    _say_trained(model, train_length)
    return Planted(model=model, truth=Truth(kind="random", train_length=train_length))


# --- carriers -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The sizes of a planted model, checked."""

    d_head: int
    base: float
    rotary_dim: int
    n_ctx: int
    d_vocab: int
    train_length: int

    @classmethod
    def of(
        cls,
        d_head: int,
        base: float,
        rotary_dim: int | None,
        n_ctx: int,
        d_vocab: int | None,
        train_length: int,
    ) -> "_Shape":
        rotary_dim = d_head if rotary_dim is None else rotary_dim
        d_vocab = min(16, d_head) if d_vocab is None else d_vocab
        faults = []
        if rotary_dim % 2 or not 2 <= rotary_dim <= d_head:
            faults.append(f"rotary_dim={rotary_dim}: an even number in 2..d_head={d_head}")
        if not 2 <= d_vocab <= d_head:
            faults.append(f"d_vocab={d_vocab}: the head copies tokens, so 2..d_head={d_head}")
        if not 3 <= train_length <= n_ctx:
            faults.append(f"train_length={train_length}: 3..n_ctx={n_ctx}")
        if not base > 1:
            faults.append(f"base={base}: above 1")
        if faults:
            raise ValueError("cannot plant this head; take " + "; ".join(faults))
        return cls(
            d_head=d_head,
            base=float(base),
            rotary_dim=rotary_dim,
            n_ctx=n_ctx,
            d_vocab=d_vocab,
            train_length=train_length,
        )

    @property
    def frequencies(self) -> Float[np.ndarray, " pair"]:
        return self.base ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)


def _check_offset(name: str, value: int, low: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a number of tokens")
    if not low <= value < end:
        raise ValueError(f"{name}={value} is out of range; take one in {low}..{end - 1}")


def _kernel(waves: np.ndarray, shape: _Shape) -> Float[np.ndarray, " offset"]:
    """g(Δ) = Re Σ_m z_m exp(−iω_m Δ) at Δ = 0 .. n_ctx − 1."""
    turns = np.exp(-1j * np.outer(np.arange(shape.n_ctx), shape.frequencies))
    return np.real(turns @ waves)


def _scale_for(waves: np.ndarray, shape: _Shape, offset: int, margin: float) -> float:
    """What makes the target stand ``margin`` nats above all other offsets below train_length."""
    if not margin > 0:
        raise ValueError(f"margin={margin} plants no peak; take a positive number of nats")
    kernel = _kernel(waves, shape)[: shape.train_length]
    return margin / float(kernel[offset] - np.delete(kernel, offset).max())


def _lobed(frequencies: np.ndarray, offset: int, lobe: int) -> np.ndarray | None:
    """The z_m, |Re z|, |Im z| ≤ 1, of the carrier that first returns at the lobe; None for none."""
    from scipy.optimize import linprog

    angles = np.outer(np.arange(lobe + 1), frequencies)
    waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    below = np.delete(waves[:lobe], offset, axis=0) - waves[offset]
    above = (waves[offset] - waves[lobe])[None]
    slack = np.concatenate([np.ones(len(below)), [0.1]])
    count = 2 * len(frequencies)
    found = linprog(
        c=[0.0] * count + [-1.0],  # the largest t with g(Δ) + t ≤ g(d) and g(d) + t/10 ≤ g(lobe)
        A_ub=np.column_stack([np.concatenate([below, above]), slack]),
        b_ub=np.zeros(len(slack)),
        bounds=[(-1.0, 1.0)] * count + [(0.0, None)],
    )
    if not found.success or found.x[-1] < 1e-6:
        return None
    cosine, sine = np.split(found.x[:-1], 2)
    waves_found: np.ndarray = cosine + 1j * sine
    return waves_found


def _plant_carrier(shape: _Shape, waves: np.ndarray, dtype: torch.dtype, truth: Truth) -> Planted:
    model, tables = _blank("rope", shape, n_layers=1, dtype=dtype)
    _bias(tables, 0, waves, shape)
    _copy_out(tables, shape, layer=0)
    truth = replace(
        truth,
        train_length=shape.train_length,
        relative=_kernel(waves, shape),
        absolute=np.zeros(shape.n_ctx),
    )
    return Planted(model=_write(model, tables), truth=truth)


def _plant_mixture(
    shape: _Shape,
    waves: np.ndarray,
    strength: float,
    partner: int,
    dtype: torch.dtype,
    kind: Kind,
    offset: int | None,
) -> Planted:
    if shape.rotary_dim + shape.d_vocab > shape.d_head:
        raise ValueError(
            f"d_vocab={shape.d_vocab} tokens do not fit into the {shape.d_head - shape.rotary_dim} "
            f"dimensions that do not turn; take d_head ≥ {shape.rotary_dim + shape.d_vocab}"
        )
    model, tables = _blank("rope", shape, n_layers=1, dtype=dtype)
    _bias(tables, 0, waves, shape)
    _match(tables, 0, shape, strength, partner=partner, key_block=0)
    _copy_out(tables, shape, layer=0)
    share = 1 / shape.d_vocab
    itself = partner % shape.d_vocab == 0
    relative = _kernel(waves, shape)
    relative[0] += strength * (float(itself) - share)
    truth = Truth(
        kind=kind,
        offset=offset,
        train_length=shape.train_length,
        relative=relative,
        absolute=np.zeros(shape.n_ctx),
        content_variance=strength**2 * share * (1 - share),
    )
    return Planted(model=_write(model, tables), truth=truth)


def _free_share(length: int) -> float:
    """Row-centred variance a pair, of contents with variance 1 at Δ ≥ 1 and none at Δ = 0."""
    index = np.arange(length)
    return float((index**2 / (index + 1)).sum() / (index + 1).sum())


def _spread(truth: Truth, shape: _Shape) -> float:
    """Standard deviation of the row-centred positional logits at the training length."""
    n = shape.train_length
    assert truth.relative is not None  # every caller plants a carrier
    kernel = truth.relative[np.abs(np.subtract.outer(np.arange(n), np.arange(n)))]
    visible = np.tril(np.ones((n, n), dtype=bool))
    mean = np.where(visible, kernel, 0).sum(1, keepdims=True) / (np.arange(n) + 1)[:, None]
    return float(np.std((kernel - mean)[visible]))


# --- weights ------------------------------------------------------------------------------------


def _blank(
    encoding: str, shape: _Shape, *, n_layers: int, dtype: torch.dtype
) -> tuple[Any, dict[str, Tensor]]:
    """A one-head model that says what it was trained on, and its weights by name, all zero.

    Residual coordinates: the token, then one block of d_vocab a layer for what it writes, then the
    slot's flag. The unembedding reads the last layer's block.
    """
    from lenprobe.models import build

    width = shape.d_vocab * (n_layers + 1) + 1
    model = build(
        encoding,
        n_layers=n_layers,
        d_model=width,
        d_head=shape.d_head,
        d_vocab=shape.d_vocab,
        n_ctx=shape.n_ctx,
        rotary_base=shape.base,
        rotary_dim=shape.rotary_dim if encoding == "rope" else None,
        dtype=dtype,
    )
    _say_trained(model, shape.train_length)
    sizes = {
        "W_Q": (1, width, shape.d_head),
        "b_Q": (1, shape.d_head),
        "W_O": (1, shape.d_head, width),
    }
    like = {"W_K": "W_Q", "W_V": "W_Q", "b_K": "b_Q", "b_V": "b_Q"}
    tables = {
        f"blocks.{layer}.attn.{name}": torch.zeros(sizes[like.get(name, name)], dtype=dtype)
        for layer in range(n_layers)
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
    }
    identity = torch.eye(shape.d_vocab, dtype=dtype)
    tables["embed.W_E"] = torch.zeros(shape.d_vocab, width, dtype=dtype)
    tables["embed.W_E"][:, : shape.d_vocab] = identity
    tables["unembed.W_U"] = torch.zeros(width, shape.d_vocab, dtype=dtype)
    tables["unembed.W_U"][n_layers * shape.d_vocab : -1] = identity
    if encoding == "learned":
        tables["pos_embed.W_pos"] = torch.zeros(shape.n_ctx, width, dtype=dtype)
    return model, tables


def _bias(tables: dict[str, Tensor], layer: int, waves: np.ndarray, shape: _Shape) -> None:
    """Plants Re Σ z_m exp(−iω_m Δ) in the biases: conj(q_m) k_m / √d_head = z_m."""
    size = np.sqrt(np.abs(waves) * math.sqrt(shape.d_head))
    for name, pairs in (("b_Q", size + 0j), ("b_K", size * np.exp(1j * np.angle(waves)))):
        flat = np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)
        target = tables[f"blocks.{layer}.attn.{name}"]
        target[0, : shape.rotary_dim] = torch.from_numpy(flat).to(target.dtype)


def _match(
    tables: dict[str, Tensor],
    layer: int,
    shape: _Shape,
    strength: float,
    *,
    partner: int,
    key_block: int,
) -> None:
    """Plants strength · [token of the key's block = query's + partner] where nothing turns."""
    tokens = torch.arange(shape.d_vocab)
    gain = math.sqrt(strength * math.sqrt(shape.d_head))
    still = shape.rotary_dim
    wanted = (tokens + partner) % shape.d_vocab
    tables[f"blocks.{layer}.attn.W_Q"][0, tokens, still + wanted] = gain
    tables[f"blocks.{layer}.attn.W_K"][0, key_block * shape.d_vocab + tokens, still + tokens] = gain


def _copy_out(tables: dict[str, Tensor], shape: _Shape, *, layer: int) -> None:
    """The layer adds the attention mass on each token to its own block."""
    tokens = torch.arange(shape.d_vocab)
    tables[f"blocks.{layer}.attn.W_V"][0, tokens, tokens] = 1.0
    block = (layer + 1) * shape.d_vocab
    tables[f"blocks.{layer}.attn.W_O"][0, tokens, block + tokens] = 1.0


def _write(model: Any, tables: dict[str, Tensor]) -> Any:
    """The model with these weights, and zero for every one that they do not name."""
    zeros = {name: torch.zeros_like(weight) for name, weight in weights_of(model).items()}
    set_weights(model, zeros | tables)
    return model


def _say_trained(model: Any, train_length: int) -> None:
    """Sets what the model says it was trained on."""
    from lenprobe.models import spec_of

    spec = spec_of(model)
    if spec is not None:
        model.lenprobe = replace(spec, train_length=train_length)
