"""The null baselines: the same head at random initialisation, and shuffled source maps.

A number that a random head also reaches is no finding, so every probe reports the value that it
gives for the same layer and head with all weights drawn afresh, on the same tokens. Definition:
ours.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from lenprobe.hosts import Host, host_of
from lenprobe.reading import (
    LayerReading,
    check_head,
    check_layer,
    check_tokens,
    default_tokens,
    read,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadReading:
    """One head read on its tokens, and the same head read at random initialisation."""

    host: Host
    tokens: Int[Tensor, "batch pos"]
    trained: LayerReading
    random: LayerReading
    seed: int


def read_with_null(
    model: Any,
    layer: int,
    head: int,
    tokens: Int[Tensor, "batch pos"] | None,
    *,
    seed: int,
    at_least: int = 2,
) -> HeadReading:
    """One head's verified reading beside that of the same head at random initialisation.

    Args:
        model: any model that ``host_of`` knows.
        layer: 0-based.
        head: 0-based.
        tokens: int64 [batch, pos]; random ones by default.
        seed: of the default tokens and of the random weights.
        at_least: the shortest length that the question can be asked at.

    Raises:
        ValueError, TypeError: bad layer, head or tokens.
    """
    host = host_of(model)
    layer, head = check_layer(host, layer), check_head(host, head)
    tokens = default_tokens(host, seed) if tokens is None else tokens
    tokens = check_tokens(host, tokens, at_least=at_least)
    trained = read(model, tokens, layer, [head])
    with reinitialised(host, seed=seed, up_to_layer=layer):
        random = read(model, tokens, layer, [head])
    return HeadReading(host=host, tokens=tokens, trained=trained, random=random, seed=seed)


@contextlib.contextmanager
def reinitialised(host: Host, *, seed: int, up_to_layer: int | None = None) -> Iterator[None]:
    """The model with weights drawn afresh, for the length of the block; then its own to the bit.

    Drawn as the hosts do: matrices and tables from N(0, σ²) with the configuration's
    ``initializer_range`` for σ (0.8/√d_model where it sets none), biases 0, norms 1. The tables
    that no training changes (sinusoids, ALiBi slopes, rotary tables) stay.

    Args:
        host: the model's adapter.
        seed: of the weights.
        up_to_layer: later blocks are left as they are, which saves time; all are redrawn by
            default.
    """
    width = float(getattr(host.cfg, "initializer_range", -1.0) or -1.0)
    sigma = width if width > 0 else 0.8 / float(host.cfg.d_model) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    kept: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for name, parameter in _own_parameters(host, up_to_layer):
            kept.append((parameter, parameter.data))
            parameter.data = _drawn(name, parameter.data, sigma, generator)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _own_parameters(host: Host, up_to_layer: int | None) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that training would change, in a fixed order, each once."""
    from lenprobe.models import spec_of

    spec = spec_of(host.model)
    fixed = ("W_pos",) if spec is not None and spec.encoding == "sinusoidal" else ()
    source = getattr(host.model, "original_model", None)
    for name, parameter in (
        source if isinstance(source, nn.Module) else host.model
    ).named_parameters():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        late = up_to_layer is not None and numbers and numbers[0] > up_to_layer
        if not late and parameter.is_floating_point() and not name.endswith(fixed or ("\0",)):
            yield name, parameter


def _drawn(name: str, data: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf.startswith("b_") or leaf in ("b", "bias"):
        return torch.zeros_like(data)
    if data.ndim == 1:  # the gain of a norm
        return torch.ones_like(data)
    return (torch.randn(data.shape, generator=generator) * sigma).to(data)


def shuffled_sources(
    sources: Int[np.ndarray, " query"], generator: np.random.Generator
) -> Int[np.ndarray, " query"]:
    """A source map that asks the same queries for other keys, each uniform among its causal ones.

    >>> shuffled_sources(np.array([-1, 0, 1, 2]), np.random.default_rng(0)).tolist()[:2]
    [-1, 0]

    Args:
        sources: τ(i), −1 where query i asks for nothing.
        generator: of the draw.
    """
    drawn = np.floor(generator.random(len(sources)) * (np.arange(len(sources)) + 1))
    return np.where(sources >= 0, drawn.astype(np.int64), -1)
