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
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from lenprobe.planting import Planted as Planted
from lenprobe.planting import (
    Shape,
    blank,
    carrier_kernel,
    check_offset,
    copy_out,
    free_share,
    lobed,
    plant_bias,
    plant_carrier,
    plant_match,
    plant_mixture,
    say_trained,
    scale_for,
    spread_of,
    write,
)
from lenprobe.planting import Truth as Truth
from lenprobe.weights import set_weights, weights_of


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
    shape = Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length or max(16, offset + 8))
    check_offset("offset", offset, 0, shape.train_length)
    waves = np.exp(1j * shape.frequencies * offset)
    waves = waves * scale_for(waves, shape, offset, margin)
    return plant_carrier(shape, waves, dtype, Truth(kind="offset", offset=offset))


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
    shape = Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length or max(16, offset + 8))
    check_offset("offset", offset, 0, shape.train_length)
    check_offset("lobe", lobe, shape.train_length, n_ctx)
    waves = lobed(shape.frequencies, offset, lobe)
    if waves is None:
        raise ValueError(
            f"no carrier with {len(shape.frequencies)} frequencies of base={base:g} peaks at "
            f"offset={offset} and first returns at lobe={lobe}; take a wider head, a smaller base "
            "or another lobe"
        )
    waves = waves * scale_for(waves, replace(shape, train_length=lobe), offset, margin)
    truth = Truth(kind="offset", offset=offset, horizon=float(lobe))
    return plant_carrier(shape, waves, dtype, truth)


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
    shape = Shape.of(d_head, 10000.0, None, n_ctx, d_vocab, train_length)
    check_offset("slot", slot, 0, train_length)
    model, tables = blank("learned", shape, n_layers=1, dtype=dtype)
    tables["pos_embed.W_pos"][slot, -1] = 1.0
    tables["blocks.0.attn.W_K"][0, -1, 0] = 1.0
    tables["blocks.0.attn.b_Q"][0, 0] = strength * math.sqrt(d_head)
    copy_out(tables, shape, layer=0)
    absolute = np.zeros(n_ctx)
    absolute[slot] = strength
    truth = Truth(
        kind="slot",
        slot=slot,
        train_length=train_length,
        relative=np.zeros(n_ctx),
        absolute=absolute,
    )
    return Planted(model=write(model, tables), truth=truth)


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
    shape = Shape.of(d_head, 10000.0, 2, n_ctx, vocabulary, train_length)
    return plant_mixture(shape, np.zeros(1, complex), strength, partner, dtype, "content", None)


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
    shape = Shape.of(d_head, 10000.0, 2, n_ctx, vocabulary, train_length)
    model, tables = blank("rope", shape, n_layers=2, dtype=dtype)
    # one pair cannot tell offset 1 from 1 + 2π k closely, so layer 0 says 40 nats a unit of cosine
    plant_bias(tables, 0, 60.0 * np.exp(1j * shape.frequencies), shape)
    plant_match(tables, 1, shape, strength, partner=0, key_block=1)
    for layer in range(2):
        copy_out(tables, shape, layer=layer)
    truth = Truth(kind="content", train_length=train_length)
    return Planted(model=write(model, tables), truth=truth, layer=1)


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
    shape = Shape.of(d_head, base, rotary_dim, n_ctx, d_vocab, train_length)
    check_offset("offset", offset, 0, train_length)
    waves = np.exp(1j * shape.frequencies * offset)
    position = spread_of(
        Truth(kind="offset", relative=carrier_kernel(waves, shape), absolute=np.zeros(n_ctx)), shape
    )
    match = math.sqrt((1 / d_vocab) * (1 - 1 / d_vocab) * free_share(train_length))
    return plant_mixture(
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
    shape = Shape.of(d_head, 10000.0, None, n_ctx, d_vocab, train_length)
    model, tables = blank(encoding, shape, n_layers=1, dtype=dtype)
    copy_out(tables, shape, layer=0)
    zero = np.zeros(n_ctx)
    truth = Truth(kind="uniform", train_length=train_length, relative=zero, absolute=zero)
    return Planted(model=write(model, tables), truth=truth)


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
    say_trained(model, train_length)
    return Planted(model=model, truth=Truth(kind="random", train_length=train_length))
