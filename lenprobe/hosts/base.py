"""What the reading layer needs of a host library, and nothing more.

A host wraps one model. It names the modules whose outputs carry q, k, the logits and the pattern
of a layer, says how the layer rotates, scales and caps, and can run the same tokens at shifted
positions. Everything a reading needs beyond that is in :mod:`lenprobe.reading`.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lenprobe.rotation import Rotation

TABLE_LIMIT = 1e-6
"""Largest error of a rotary table that counts as rounding, a position."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a layer turns q and k into logits: ``cap(scale · ⟨R q, R k⟩) + bias``."""

    rotation: Rotation | None
    scale: float
    soft_cap: float | None = None
    biased: bool = False
    """The logits carry a position bias (ALiBi, T5) that q and k do not."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The query and key projections of one head, as the attention input meets them."""

    w_q: Float[Tensor, "d_model d_head"]
    w_k: Float[Tensor, "d_model d_head"]
    b_q: Float[Tensor, " d_head"]
    b_k: Float[Tensor, " d_head"]


class Host(ABC):
    """One model behind the interface that readings use."""

    attention = "softmax"
    """``"linear"`` where the pattern is the raw masked logits."""
    first_position = 0
    """The position of the first token; :meth:`shifted` changes it."""
    exact_tables = False
    """Whether float64-computed rotary tables are in place; :meth:`shifted` changes it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cfg = model.cfg

    # --- what it is -------------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The host's name for error messages and provenance."""

    @property
    def architecture(self) -> str:
        """The architecture's name, for error messages and provenance."""
        return str(getattr(self.cfg, "original_architecture", None) or self.name)

    @property
    def description(self) -> str:
        """Architecture, host and size in one phrase."""
        size = f"{self.n_layers}L{self.n_heads}H d{self.cfg.d_model}"
        names = dict.fromkeys((self.architecture, self.name))  # the two may be one
        first, *rest = names
        return f"{first} ({', '.join((*rest, self.positions, size))})"

    @property
    def n_layers(self) -> int:
        return int(self.cfg.n_layers)

    @property
    def n_heads(self) -> int:
        return int(self.cfg.n_heads)

    @property
    def d_head(self) -> int:
        return int(self.cfg.d_head)

    @property
    def d_vocab(self) -> int:
        return int(self.cfg.d_vocab)

    @property
    def n_ctx(self) -> int:
        return int(self.cfg.n_ctx)

    @property
    def positions(self) -> str:
        """The kind of positions: ``rotary``, ``standard``, ``alibi``, ``none``, or as built."""
        return str(getattr(self.cfg, "positional_embedding_type", "none"))

    @property
    def causal(self) -> bool:
        return str(getattr(self.cfg, "attention_dir", "causal")) == "causal"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    # --- where its activations are ----------------------------------------------------------

    def attn(self, layer: int) -> nn.Module:
        """The attention module of a layer."""
        module: nn.Module = self.model.blocks[layer].attn
        return module

    @abstractmethod
    def taps(self, layer: int) -> Mapping[str, nn.Module]:
        """The modules whose outputs to keep, by role.

        Roles: ``scores``, ``pattern``; ``q`` and ``k`` before rotation, ``q_normed`` and
        ``k_normed`` where a QK-norm follows them; ``cos`` and ``sin`` where the host hooks them.
        """

    @abstractmethod
    def geometry(self, layer: int, kept: Mapping[str, Tensor], length: int) -> Geometry:
        """How the layer makes logits of q and k, given what the taps kept."""

    @abstractmethod
    def projection(self, layer: int, head: int) -> Projection:
        """The head's query and key weights and biases."""

    def window(self, layer: int) -> int | None:
        """How many keys back a query sees; None for all."""
        return None

    def visible(self, layer: int, length: int) -> Bool[Tensor, "query key"]:
        """Which keys a query may attend to."""
        index = torch.arange(length, device=self.device)
        offset = index[:, None] - index[None, :]
        seen = offset >= 0 if self.causal else torch.ones_like(offset, dtype=torch.bool)
        window = self.window(layer)
        return seen if window is None else seen & (offset.abs() < window)

    # --- running it -------------------------------------------------------------------------

    def run(self, tokens: Int[Tensor, "batch pos"], **kwargs: Any) -> Any:
        """The model's forward on tokens."""
        return self.model(tokens, **kwargs)

    @contextlib.contextmanager
    def shifted(self, shift: int, length: int, *, exact: bool) -> Iterator[Mapping[str, Any]]:
        """A context in which positions are ``shift .. shift + length − 1``.

        Args:
            shift: δ ≥ 0.
            length: of the sequences that will be run.
            exact: rotary tables computed in float64, rather than the host's own.

        Yields:
            Keyword arguments for :meth:`run`.

        Raises:
            ValueError: the model has no such positions.
        """
        before = self.first_position, self.exact_tables
        with self._shifted(shift, length, exact=exact) as arguments:
            self.first_position, self.exact_tables = shift, exact
            try:
                yield arguments
            finally:
                self.first_position, self.exact_tables = before

    @abstractmethod
    def _shifted(
        self, shift: int, length: int, *, exact: bool
    ) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """What :meth:`shifted` does on this host."""

    @contextlib.contextmanager
    def placed(
        self, first: Int[Tensor, " batch"] | None, length: int
    ) -> Iterator[Mapping[str, Any]]:
        """A context in which each sequence of a batch starts at a position of its own.

        Args:
            first: the position of each sequence's first token; all 0 where None.
            length: of the sequences that will be run.

        Yields:
            Keyword arguments for :meth:`run`. Gradients reach a table's rows.
        """
        if first is None:
            yield {}
            return
        self.check_rows(int(first.max()), length)
        positions = first.to(self.device)[:, None] + torch.arange(length, device=self.device)
        with self._placed(positions) as arguments:
            yield arguments

    @contextlib.contextmanager
    def _placed(self, positions: Int[Tensor, "batch pos"]) -> Iterator[Mapping[str, Any]]:
        """What :meth:`placed` does on this host; most take the positions as an argument."""
        yield {"position_ids": positions}

    def tables_exact(self, dtype: torch.dtype) -> bool:
        """Whether the host's own rotary tables are computed in float64 in a model of this dtype."""
        return False

    def check_rows(self, shift: int, length: int) -> None:
        """Raises where a table of positions ends before the shifted sequence does."""
        if shift + length > self.n_ctx:
            raise ValueError(
                f"shift={shift} puts a sequence of {length} at positions up to "
                f"{shift + length - 1}, but {self.architecture} has a table of {self.n_ctx}; "
                f"take shifts in 0..{self.n_ctx - length}"
            )


def table_error(
    rotation: Rotation, cos: Float[Tensor, "pos dim"], sin: Float[Tensor, "pos dim"], *, first: int
) -> float:
    """How far the host's tables are from the rotation's, a position.

    The angle that a float32 table holds is off by a rounding that grows with the position, so
    errors count relative to it; what a table in half precision cannot hold at all is let pass.
    """
    positions = torch.arange(first, first + cos.shape[0], device=cos.device)
    own = [rotation.host_layout(t) for t in rotation.table(positions, torch.float64)]
    coarse = rotation.magnitude * torch.finfo(cos.dtype).eps
    return max(
        (((mine - theirs.double()).abs() - coarse) / (1 + positions[:, None])).max().item()
        for mine, theirs in zip(own, (cos, sin), strict=True)
    )


def verify_table(
    rotation: Rotation,
    cos: Float[Tensor, "pos dim"],
    sin: Float[Tensor, "pos dim"],
    *,
    first: int,
    where: str,
) -> None:
    """Raises where the host's tables are not those of the rotation.

    Tables of another base, scaling or layout are off by far more than by their rounding.
    """
    error = table_error(rotation, cos, sin, first=first)
    if not error <= TABLE_LIMIT:
        raise ValueError(
            f"{where}: the rotary tables in use are off by {error:.1e} a position from every "
            f"frequency rule that lenprobe knows (limit {TABLE_LIMIT:.0e}): a rope scaling it does "
            "not know, or tables that came with a checkpoint of another base. Known: default, "
            "linear, llama3, yarn, and dynamic within the original context"
        )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs a block without gradients and in eval mode, and puts the model back as it was.

    Kept and restored on every module: buffers, hooks (a bridge adds some of its own in its first
    forward), plain tensors (the ALiBi cache), plain attributes (train or eval, the lengths that
    rotary tables were built for); and the global random state.
    """
    kept = [(module, _state(module), _tables(module)) for module in _modules(model)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            if any(module.training for module, *_ in kept):
                model.eval()
            yield
    finally:
        for module, state, tables in kept:
            for name in _state(module).keys() - state.keys():
                module.__dict__.pop(name)
            module.__dict__.update(state)
            for name, table in tables.items():
                own = module.__dict__[name]
                own.clear()
                own.update(table)


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module, those too that a bridge does not list as its own (a tied unembedding)."""
    wrapped = getattr(model, "original_model", None)
    both = [*model.modules(), *(wrapped.modules() if isinstance(wrapped, nn.Module) else ())]
    return list({id(module): module for module in both}.values())


def _state(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None), Tensor)
    return {name: value for name, value in vars(module).items() if isinstance(value, plain)}


def _tables(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Copies of the module's registers of buffers and of forward hooks."""
    return {
        name: dict(value)
        for name, value in vars(module).items()
        if isinstance(value, dict) and (name == "_buffers" or name.startswith("_forward"))
    }


@contextlib.contextmanager
def cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The model's floating weights in another dtype, for the length of the block.

    The parameters keep their identity; they and the buffers get their own storage back, to the bit.
    Rotary frequencies stay as they are: a model loaded in a small dtype keeps them in float32.
    """
    modules = _modules(model)
    parameters = (p for module in modules for p in module._parameters.values() if p is not None)
    kept = {id(p): (p, p.data) for p in parameters}
    buffers = [(module, dict(module._buffers)) for module in modules]
    owned: list[Any] = [getattr(module, "cfg", None) for module in modules]
    configurations = [cfg for cfg in owned if hasattr(cfg, "dtype")]
    dtypes = [cfg.dtype for cfg in configurations]
    try:
        for cfg in configurations:  # norms cast to what the configuration says
            cfg.dtype = dtype
        for parameter, data in kept.values():
            if data.is_floating_point():
                parameter.data = data.to(dtype)
        for module in modules:
            for name, buffer in list(module._buffers.items()):
                narrows = buffer is not None and buffer.is_floating_point()
                if buffer is not None and narrows and not name.endswith("inv_freq"):
                    module._buffers[name] = buffer.to(dtype)
        yield
    finally:
        for cfg, own_dtype in zip(configurations, dtypes, strict=True):
            cfg.dtype = own_dtype
        for parameter, data in kept.values():
            parameter.data = data
        for module, own in buffers:
            module._buffers.update(own)
