"""Verified readings: the logits that a head's softmax received, and what made them.

A reading is trusted only after two checks against the model itself, in the same forward pass:

1. the softmax of the logits read reproduces the pattern that the model used;
2. the unrotated q and k, the rotary frequencies, the scale and the soft-cap reproduce the logits.

Where the host's score hook carries the pattern instead of the logits, the logits are recomputed
from q and k, and check 1 verifies them. What cannot be verified raises ``UnverifiedReading``.
Definition: ours.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lenprobe.hosts import Geometry, Host, untouched
from lenprobe.hosts import host_of as host_of
from lenprobe.results import Provenance, tokens_hash
from lenprobe.rotation import Rotation

T = TypeVar("T")

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest difference allowed between the softmax of the logits read and the pattern, by dtype.

Hosts over Hugging Face models take the softmax in float32 even in float64 models.
"""

_CACHED = 2**19  # numbers that stay in a core's cache from one pass over them to the next
_QK_ROWS, _QK_SEQUENCES = 16, 2  # on which q and k are checked against the logits


class UnverifiedReading(RuntimeError):
    """The logits read are not those that the model's softmax received."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerReading:
    """One layer's heads on a batch of sequences, verified.

    Activations are in the model's dtype and on its device; ``q`` and ``k`` are float64.
    """

    layer: int
    heads: tuple[int, ...]
    scores: Float[Tensor, "batch head query key"]
    """The logits, with whatever number the host puts where a key is masked."""
    pattern: Float[Tensor, "batch head query key"]
    visible: Bool[Tensor, "query key"]
    """Which keys a query may attend to."""
    queries: Float[Tensor, "batch pos head d_head"] | None
    keys: Float[Tensor, "batch pos kv d_head"] | None
    """Before rotation, one key a group of query heads; None where the host has no hook there."""
    inputs: Float[Tensor, "batch pos d_model"]
    """What the layer's projections read: the residual stream after the norm."""
    geometry: Geometry
    self_check: float
    """Largest absolute error of the softmax of the logits against the pattern."""

    @cached_property
    def logits(self) -> Float[Tensor, "batch head query key"]:
        """After scale, soft-cap and position bias; −inf where masked."""
        return self.scores.masked_fill(~self.visible, -math.inf)

    @cached_property
    def q(self) -> Float[Tensor, "batch pos head d_head"] | None:
        """Before rotation, in float64."""
        return None if self.queries is None else self.queries.double()

    @cached_property
    def k(self) -> Float[Tensor, "batch pos head d_head"] | None:
        """Before rotation, in float64, one a query head also under grouped queries."""
        if self.keys is None or self.queries is None:
            return None
        return _a_query_head(self.keys, self.queries.shape[2]).double()

    @property
    def rotation(self) -> Rotation | None:
        """How the layer rotates q and k; None where it does not."""
        return self.geometry.rotation

    @property
    def scale(self) -> float:
        """What q·k is multiplied by."""
        return self.geometry.scale

    @property
    def soft_cap(self) -> float | None:
        """The logits are ``cap · tanh(logits / cap)``; None for no cap."""
        return self.geometry.soft_cap


def read(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    heads: Iterable[int] | None = None,
) -> LayerReading:
    """One layer of the model on the tokens, verified.

    Args:
        model: any model that ``host_of`` knows.
        tokens: int64 [batch, pos], at least 2 long.
        layer: 0-based; a negative index counts from the end, as in a list.
        heads: which heads, in this order; all by default.

    Raises:
        ValueError, TypeError: bad layer, heads or tokens, or a compiled model.
        UnverifiedReading: the reading does not reproduce the model's pattern.
    """
    host = host_of(model)
    layer = check_layer(host, layer)
    chosen = None if heads is None else tuple(check_head(host, head) for head in heads)
    found = _stream(host, check_tokens(host, tokens), {layer}, chosen, lambda reading: reading)
    return found[layer]


def stream(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    reduce: Callable[[LayerReading], T],
    layers: Iterable[int] | None = None,
    *,
    on_failure: Callable[[int, UnverifiedReading], None] | None = None,
) -> dict[int, T]:
    """What ``reduce`` makes of each layer's reading, in one forward pass.

    ``reduce`` runs inside the layer's hook, and the reading is dropped when it returns: nothing of
    size n² is kept beyond the layer at work, unless ``reduce`` keeps it.

    Args:
        model: any model that ``host_of`` knows.
        tokens: int64 [batch, pos].
        reduce: called once a layer, without gradients.
        layers: which; all by default.
        on_failure: called with a layer that cannot be verified, which then has no result; the
            others go on. Without it the first such layer ends the pass.

    Returns:
        A dict from layer to result, in layer order.
    """
    host = host_of(model)
    every = range(host.n_layers) if layers is None else layers
    wanted = {check_layer(host, layer) for layer in every}
    return _stream(host, check_tokens(host, tokens), wanted, None, reduce, on_failure)


def read_shifted(
    host: Host,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    head: int,
    shift: int,
    *,
    exact: bool = True,
) -> LayerReading:
    """The layer with every position of the model shifted by ``shift``, one head, verified.

    Call it inside :func:`lenprobe.hosts.untouched` when more than one is wanted: entering that
    context once is cheaper.
    """
    with untouched(host.model), host.shifted(shift, tokens.shape[1], exact=exact) as arguments:
        return _collect(host, tokens, {layer}, (head,), lambda reading: reading, arguments)[layer]


# --- the pass -----------------------------------------------------------------------------------


class _Done(Exception):
    pass


def _stream(
    host: Host,
    tokens: Tensor,
    layers: Collection[int],
    heads: tuple[int, ...] | None,
    reduce: Callable[[LayerReading], T],
    on_failure: Callable[[int, UnverifiedReading], None] | None = None,
) -> dict[int, T]:
    with untouched(host.model):
        return _collect(host, tokens, layers, heads, reduce, {}, on_failure)


def _collect(
    host: Host,
    tokens: Tensor,
    layers: Collection[int],
    heads: tuple[int, ...] | None,
    reduce: Callable[[LayerReading], T],
    arguments: Any,
    on_failure: Callable[[int, UnverifiedReading], None] | None = None,
) -> dict[int, T]:
    results: dict[int, T] = {}
    failed: set[int] = set()
    handles = []
    last = max(layers, default=-1)

    def at_end(layer: int, kept: dict[str, Tensor], module: nn.Module, *_: Any) -> None:
        try:
            reading = _assemble(host, layer, kept, heads)
        except UnverifiedReading as error:
            if on_failure is None:
                raise
            failed.add(layer)
            on_failure(layer, error)
        else:
            results[layer] = reduce(reading)
        finally:
            kept.clear()
        if layer == last:
            raise _Done

    try:
        for layer in sorted(layers):
            kept: dict[str, Tensor] = {}
            for role, module in host.taps(layer).items():
                handles.append(module.register_forward_hook(partial(_keep, kept, role)))
            attn = host.attn(layer)
            handles.append(
                attn.register_forward_pre_hook(partial(_keep_input, kept), with_kwargs=True)
            )
            handles.append(attn.register_forward_hook(partial(at_end, layer, kept)))
        host.run(tokens, **arguments)
    except _Done:
        pass
    finally:
        for handle in handles:
            handle.remove()
    missing = sorted(set(layers) - results.keys() - failed)
    if missing:
        raise UnverifiedReading(
            f"{host.architecture}: layers {missing} ran no attention that {host.name} hooks"
        )
    return dict(sorted(results.items()))


def _keep(kept: dict[str, Tensor], role: str, module: nn.Module, args: Any, out: Any) -> None:
    kept[role] = out


def _keep_input(kept: dict[str, Tensor], module: nn.Module, args: Any, kwargs: Any) -> None:
    named = (kwargs.get(name) for name in ("query_input", "hidden_states"))
    kept["inputs"] = next(x for x in (*args, *named) if isinstance(x, Tensor))


# --- one layer ----------------------------------------------------------------------------------


def _assemble(
    host: Host, layer: int, kept: dict[str, Tensor], heads: tuple[int, ...] | None
) -> LayerReading:
    where = f"{host.architecture} ({host.name}) layer {layer}"
    if "pattern" not in kept:
        raise UnverifiedReading(f"{where}: no pattern passed its hook, so nothing can be verified")
    pattern, scores = kept["pattern"], kept.get("scores")
    length = pattern.shape[-1]
    positions = torch.arange(length, device=pattern.device) + host.first_position
    geometry = host.geometry(layer, kept, length)
    q, k = (_split_heads(host, kept, role) for role in ("q", "k"))

    chosen = tuple(range(pattern.shape[1])) if heads is None else heads
    if heads is not None:
        index = torch.tensor(heads, device=pattern.device)
        group = 1 if q is None or k is None else q.shape[2] // k.shape[2]
        pattern = pattern[:, index]
        scores = None if scores is None else scores[:, index]
        q = None if q is None else q[:, :, index]
        k = None if k is None else k[:, :, index // group]

    if scores is None or _carries_pattern(scores, pattern):
        visible = host.visible(layer, length)
        scores = _from_qk(where, q, k, geometry, positions, exact=host.exact_tables)
        scores = scores.masked_fill_(~visible, -math.inf).to(pattern.dtype)
    else:
        visible = _visible(where, scores)
        dtype = min(scores.dtype, kept.get("q", scores).dtype, key=lambda each: each.itemsize)
        _check_qk(where, q, k, geometry, positions, scores, visible, dtype)
    error = _pattern_error(scores, pattern, visible, host.attention)
    if not error <= TOLERANCE[pattern.dtype]:
        raise UnverifiedReading(
            f"{where}: the softmax of the logits read differs from the model's pattern by "
            f"{error:.1e} (limit {TOLERANCE[pattern.dtype]:.0e} in {pattern.dtype}). Something "
            "changes the logits after the reading: a hook that edits scores, attention sinks, or "
            "an attention that this host does not show"
        )
    return LayerReading(
        layer=layer,
        heads=chosen,
        scores=scores,
        pattern=pattern,
        visible=visible,
        queries=q,
        keys=k,
        inputs=kept["inputs"],
        geometry=geometry,
        self_check=error,
    )


def _split_heads(host: Host, kept: dict[str, Tensor], role: str) -> Tensor | None:
    """Q or k as [batch, pos, head, d_head], after a QK-norm where there is one."""
    batch, _, length, _ = kept["pattern"].shape
    x = kept.get(f"{role}_normed", kept.get(role))
    if x is None:
        return None
    if x.ndim == 4 and x.shape[1] != length:  # norms after the reshape: [batch, head, pos, d_head]
        x = rearrange(x, "batch head pos d -> batch pos head d")
    return x.reshape(batch, length, -1, host.d_head)


def _a_query_head(k: Tensor, heads: int) -> Tensor:
    """One k a query head, where groups of them share one."""
    if k.shape[2] == heads:
        return k
    return repeat(k, "batch pos kv d -> batch pos (kv group) d", group=heads // k.shape[2])


def _visible(where: str, scores: Tensor) -> Bool[Tensor, "query key"]:
    """Which keys a query sees: bridges mask with the dtype's minimum, HookedTransformer with −inf.

    Not-a-number counts as seen, so that it shows. A mask over keys, as for padding, reaches the
    last query, where all sequences and heads must agree.
    """
    below = max(-1e30, 0.9 * torch.finfo(scores.dtype).min)
    visible = ~(scores[0, 0] <= below)
    if not torch.equal(~(scores[:, :, -1] <= below), visible[-1].expand(*scores.shape[:2], -1)):
        raise UnverifiedReading(
            f"{where}: the sequences or heads of one batch see different keys, as under padding, "
            "which one reading cannot hold; give tokens without padding, or one sequence at a time"
        )
    return visible


def _carries_pattern(scores: Tensor, pattern: Tensor) -> bool:
    if scores is pattern:
        return True
    return torch.equal(scores[0, 0], pattern[0, 0]) and torch.equal(scores, pattern)


def _from_qk(
    where: str,
    q: Tensor | None,
    k: Tensor | None,
    geometry: Geometry,
    positions: Tensor,
    *,
    exact: bool,
) -> Tensor:
    if q is None or k is None or geometry.biased:
        raise UnverifiedReading(
            f"{where}: the score hook carries the pattern, and the logits cannot be recomputed "
            "(no q and k before the rotation, or a position bias that no hook shows)"
        )
    return qk_logits(q.double(), k.double(), geometry, positions, exact=exact)


def qk_logits(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv d_head"],
    geometry: Geometry,
    positions: Int[Tensor, " key"],
    *,
    rows: Int[Tensor, " query"] | None = None,
    exact: bool = True,
) -> Float[Tensor, "batch head query key"]:
    """The logits that unrotated q and k make at the positions, in their dtype, unmasked.

    Args:
        q: at the positions ``rows`` selects, all by default.
        k: at all positions, one a query head or one a group of them.
        geometry: the layer's rotation, scale and soft-cap.
        positions: of the keys.
        rows: which of ``positions`` the queries have.
        exact: rotary tables in float64.
    """
    at = positions if rows is None else positions[rows]
    if geometry.rotation is not None:
        q = geometry.rotation.apply(q, at, exact=exact)
        k = geometry.rotation.apply(k, positions, exact=exact)
    k = _a_query_head(k, q.shape[2])
    q = rearrange(q, "batch query head d -> batch head query d")
    k = rearrange(k, "batch key head d -> batch head d key")
    logits = (q @ k) * geometry.scale
    if geometry.soft_cap is not None:
        logits = geometry.soft_cap * torch.tanh(logits / geometry.soft_cap)
    return logits


def _check_qk(
    where: str,
    q: Tensor | None,
    k: Tensor | None,
    geometry: Geometry,
    positions: Tensor,
    scores: Tensor,
    visible: Tensor,
    dtype: torch.dtype,
) -> None:
    """Raises where q, k and the rotation do not make the logits, on a spread of query rows.

    ``dtype`` is the coarsest that the products went through.
    """
    if q is None or k is None:
        return
    length = q.shape[1]
    count = min(length, _QK_ROWS)
    rows = torch.linspace(0, length - 1, count, device=q.device).round().long()
    q, k, scores = (x[:_QK_SEQUENCES] for x in (q, k, scores))
    own = qk_logits(q[:, rows].double(), k.double(), geometry, positions, rows=rows)
    seen = visible[rows]
    difference = (own - scores[:, :, rows].double()).masked_fill(~seen, 0.0)
    if geometry.biased:  # the bias is the same for every content: compare contents with each other
        difference = (difference - difference[:1]).masked_fill(~seen, 0.0)
    spread = own.masked_fill(~seen, 0.0).abs().amax().item()
    rounding = 1e-6 * (int(positions[-1]) + 100)  # of float32 tables, grows with the position
    unit = {torch.bfloat16: 5e-2, torch.float16: 1e-2}.get(dtype, 0.0) + rounding
    if not difference.abs().amax().item() <= unit * (1.0 + spread):
        raise UnverifiedReading(
            f"{where}: q, k, the rotation and the scale read do not make the logits: off by "
            f"{difference.abs().amax().item():.1e} of {spread:.1e}. The layer does something "
            "between q and k and its softmax that this host does not show"
        )


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Some rows of a layer's n × n, and the keys that one of them sees at least."""

    rows: slice
    keys: slice
    part: slice
    """Of ``keys``, counted from the first: those that some of the rows do not see."""
    hidden: Bool[Tensor, "row part"]

    def fill(self, x: Float[Tensor, "*any row key"], value: float) -> None:
        """Sets what is masked, in place."""
        if self.part.start < self.part.stop:
            x[..., self.part].masked_fill_(self.hidden, value)


def row_blocks(visible: Bool[Tensor, "query key"], matrices: int) -> Iterator[RowBlock]:
    """The rows of n × n matrices, so few at a time that several passes find them in the cache.

    Of a causal mask that leaves about half of the pairs. Rows that see no key come along.

    Args:
        visible: the mask that the matrices share.
        matrices: how many there are.
    """
    mask = visible.cpu().numpy()
    n = len(mask)
    room = _CACHED if visible.device.type == "cpu" else 64 * _CACHED
    step = max(1, room // (matrices * n))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        columns = np.flatnonzero(mask[rows].any(axis=0))
        keys = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 1)
        some = np.flatnonzero(~mask[rows, keys].all(axis=0))
        part = slice(int(some[0]), int(some[-1]) + 1) if len(some) else slice(0, 0)
        hidden = ~visible[rows, keys.start + part.start : keys.start + part.stop]
        yield RowBlock(rows=rows, keys=keys, part=part, hidden=hidden)


def _pattern_error(
    scores: Float[Tensor, "batch head query key"],
    pattern: Float[Tensor, "batch head query key"],
    visible: Bool[Tensor, "query key"],
    attention: str,
) -> float:
    batch, heads, n, _ = scores.shape
    dtype = torch.promote_types(scores.dtype, torch.float32)
    blind = not bool(visible.any(dim=-1).all())  # rows that see no key
    worst: list[Tensor] = []
    x = y = scores.new_empty(0, dtype=dtype)
    for block in row_blocks(visible, batch * heads):
        rows, keys = block.rows, block.keys
        used = pattern[:, :, rows, keys]
        if x.numel() < used.numel():
            x, y = (scores.new_empty(used.numel(), dtype=dtype) for _ in range(2))
        logits, own = (each[: used.numel()].view(used.shape) for each in (x, y))
        logits.copy_(scores[:, :, rows, keys])
        if attention == "linear":
            own.copy_(logits)
            block.fill(own, 0.0)
        else:
            block.fill(logits, -math.inf)
            torch.softmax(logits, dim=-1, out=own)
            if blind:
                own.nan_to_num_(nan=0.0)
        worst += own.sub_(used).aminmax()
        for outside in (slice(0, keys.start), slice(keys.stop, n)):
            if outside.start < outside.stop:
                worst += pattern[:, :, rows, outside].aminmax()
    return float(torch.stack([each.to(dtype) for each in worst]).abs().amax())


# --- what a call is given -----------------------------------------------------------------------


def check_layer(host: Host, layer: int) -> int:
    """The layer's index from 0, or an error that names the range."""
    return _check_index("layer", layer, host.n_layers, host)


def check_head(host: Host, head: int) -> int:
    """The head's index from 0, or an error that names the range."""
    return _check_index("head", head, host.n_heads, host)


def _check_index(name: str, value: int, count: int, host: Host) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass an integer")
    if not -count <= value < count:
        raise ValueError(f"{name}={value} is out of range: {host.description} has 0..{count - 1}")
    return int(value) % count


def check_tokens(
    host: Host, tokens: Int[Tensor, "batch pos"], *, at_least: int = 2
) -> Int[Tensor, "batch pos"]:
    """The tokens as int64 on the model's device, or an error that names what is wrong."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"tokens is a {type(tokens).__name__}; pass an integer torch.Tensor [batch, pos], for "
            "example model.to_tokens(text)"
        )
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"tokens.dtype is {tokens.dtype}; token ids are int64")
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}; [batch, pos] is needed, so add the batch axis "
            "with tokens[None] where it is one sequence"
        )
    batch, length = tokens.shape
    if batch < 1 or length < at_least:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}; at least 1 sequence of {at_least} tokens is "
            "needed, since a single position has no key to choose"
        )
    if length > host.n_ctx:
        raise ValueError(
            f"tokens has {length} positions, but {host.description} takes at most "
            f"n_ctx={host.n_ctx}; pass tokens[:, :{host.n_ctx}]"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= host.d_vocab:
        raise ValueError(
            f"tokens holds ids {low}..{high}, outside the vocabulary 0..{host.d_vocab - 1}"
        )
    return tokens.to(host.device, torch.int64)


def random_tokens(d_vocab: int, batch: int, length: int, seed: int = 0) -> Int[Tensor, "batch pos"]:
    """Uniform random token ids: content that says nothing about position.

    >>> random_tokens(d_vocab=5, batch=1, length=4, seed=0).shape
    torch.Size([1, 4])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, d_vocab, (batch, length), generator=generator)


def default_tokens(host: Host, seed: int = 0) -> Int[Tensor, "batch pos"]:
    """Random tokens as long as the model was trained on, or 128 for models of other origin.

    The batch holds about 16,384 tokens for small models, 1,024 for large ones (over 10⁷ weights).
    """
    from lenprobe.models import spec_of

    spec = spec_of(host.model)
    trained = None if spec is None else spec.train_length
    length = min(trained or 128, host.n_ctx)
    large = sum(p.numel() for p in host.model.parameters()) > 10**7
    batch = max(8, (1024 if large else 16384) // length)
    return random_tokens(host.d_vocab, batch, length, seed)


def train_length_of(host: Host, tokens: Int[Tensor, "batch pos"]) -> int:
    """The length trained on where the model knows it, else that of the tokens."""
    from lenprobe.models import spec_of

    spec = spec_of(host.model)
    trained = None if spec is None else spec.train_length
    return trained or tokens.shape[1]


def known_train_length(host: Host, train_length: int | None) -> int:
    """The length trained on: as given, or as the model says.

    Raises:
        ValueError: neither says.
    """
    from lenprobe.models import spec_of

    spec = spec_of(host.model)
    known = train_length or (None if spec is None else spec.train_length)
    if known is None:
        raise ValueError(
            f"{host.description} does not say on which length it was trained; give train_length, "
            "the position from which on queries count as new"
        )
    return known


def provenance(
    verb: str,
    host: Host,
    reading: LayerReading,
    tokens: Tensor,
    *,
    seed: int | None = None,
    **settings: Any,
) -> Provenance:
    """Where a result about one head came from."""
    return Provenance(
        verb=verb,
        model=host.description,
        layer=reading.layer,
        head=reading.heads[0] if len(reading.heads) == 1 else None,
        tokens_shape=tuple(tokens.shape),
        tokens_hash=tokens_hash(tokens),
        seed=seed,
        self_check=reading.self_check,
        settings=settings,
    )
