"""What planted heads are made of: their truth, their carriers' arithmetic, their weights.

See :mod:`lenprobe.planted`, which plants them.
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

        >>> from lenprobe.planted import pin
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


@dataclass(frozen=True, kw_only=True)
class Shape:
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
    ) -> "Shape":
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


def check_offset(name: str, value: int, low: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a number of tokens")
    if not low <= value < end:
        raise ValueError(f"{name}={value} is out of range; take one in {low}..{end - 1}")


def carrier_kernel(waves: np.ndarray, shape: Shape) -> Float[np.ndarray, " offset"]:
    """g(Δ) = Re Σ_m z_m exp(−iω_m Δ) at Δ = 0 .. n_ctx − 1."""
    turns = np.exp(-1j * np.outer(np.arange(shape.n_ctx), shape.frequencies))
    return np.real(turns @ waves)


def scale_for(waves: np.ndarray, shape: Shape, offset: int, margin: float) -> float:
    """What makes the target stand ``margin`` nats above all other offsets below train_length."""
    if not margin > 0:
        raise ValueError(f"margin={margin} plants no peak; take a positive number of nats")
    kernel = carrier_kernel(waves, shape)[: shape.train_length]
    return margin / float(kernel[offset] - np.delete(kernel, offset).max())


def lobed(frequencies: np.ndarray, offset: int, lobe: int) -> np.ndarray | None:
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


def plant_carrier(shape: Shape, waves: np.ndarray, dtype: torch.dtype, truth: Truth) -> Planted:
    model, tables = blank("rope", shape, n_layers=1, dtype=dtype)
    plant_bias(tables, 0, waves, shape)
    copy_out(tables, shape, layer=0)
    truth = replace(
        truth,
        train_length=shape.train_length,
        relative=carrier_kernel(waves, shape),
        absolute=np.zeros(shape.n_ctx),
    )
    return Planted(model=write(model, tables), truth=truth)


def plant_mixture(
    shape: Shape,
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
    model, tables = blank("rope", shape, n_layers=1, dtype=dtype)
    plant_bias(tables, 0, waves, shape)
    plant_match(tables, 0, shape, strength, partner=partner, key_block=0)
    copy_out(tables, shape, layer=0)
    share = 1 / shape.d_vocab
    itself = partner % shape.d_vocab == 0
    relative = carrier_kernel(waves, shape)
    relative[0] += strength * (float(itself) - share)
    truth = Truth(
        kind=kind,
        offset=offset,
        train_length=shape.train_length,
        relative=relative,
        absolute=np.zeros(shape.n_ctx),
        content_variance=strength**2 * share * (1 - share),
    )
    return Planted(model=write(model, tables), truth=truth)


def free_share(length: int) -> float:
    """Row-centred variance a pair, of contents with variance 1 at Δ ≥ 1 and none at Δ = 0."""
    index = np.arange(length)
    return float((index**2 / (index + 1)).sum() / (index + 1).sum())


def spread_of(truth: Truth, shape: Shape) -> float:
    """Standard deviation of the row-centred positional logits at the training length."""
    n = shape.train_length
    assert truth.relative is not None  # every caller plants a carrier
    kernel = truth.relative[np.abs(np.subtract.outer(np.arange(n), np.arange(n)))]
    visible = np.tril(np.ones((n, n), dtype=bool))
    mean = np.where(visible, kernel, 0).sum(1, keepdims=True) / (np.arange(n) + 1)[:, None]
    return float(np.std((kernel - mean)[visible]))


# --- weights ------------------------------------------------------------------------------------


def blank(
    encoding: str, shape: Shape, *, n_layers: int, dtype: torch.dtype
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
    say_trained(model, shape.train_length)
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


def plant_bias(tables: dict[str, Tensor], layer: int, waves: np.ndarray, shape: Shape) -> None:
    """Plants Re Σ z_m exp(−iω_m Δ) in the biases: conj(q_m) k_m / √d_head = z_m."""
    size = np.sqrt(np.abs(waves) * math.sqrt(shape.d_head))
    for name, pairs in (("b_Q", size + 0j), ("b_K", size * np.exp(1j * np.angle(waves)))):
        flat = np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)
        target = tables[f"blocks.{layer}.attn.{name}"]
        target[0, : shape.rotary_dim] = torch.from_numpy(flat).to(target.dtype)


def plant_match(
    tables: dict[str, Tensor],
    layer: int,
    shape: Shape,
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


def copy_out(tables: dict[str, Tensor], shape: Shape, *, layer: int) -> None:
    """The layer adds the attention mass on each token to its own block."""
    tokens = torch.arange(shape.d_vocab)
    tables[f"blocks.{layer}.attn.W_V"][0, tokens, tokens] = 1.0
    block = (layer + 1) * shape.d_vocab
    tables[f"blocks.{layer}.attn.W_O"][0, tokens, block + tokens] = 1.0


def write(model: Any, tables: dict[str, Tensor]) -> Any:
    """The model with these weights, and zero for every one that they do not name."""
    zeros = {name: torch.zeros_like(weight) for name, weight in weights_of(model).items()}
    set_weights(model, zeros | tables)
    return model


def say_trained(model: Any, train_length: int) -> None:
    """Sets what the model says it was trained on."""
    from lenprobe.models import spec_of

    spec = spec_of(model)
    if spec is not None:
        model.lenprobe = replace(spec, train_length=train_length)
