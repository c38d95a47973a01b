"""Heads silenced: what a model does without them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from lenprobe.hosts import host_of
from lenprobe.reading import check_head, check_layer


@contextlib.contextmanager
def ablated(model: Any, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """The model with the output of some heads at zero, for the length of the block.

    >>> import torch
    >>> from lenprobe import build
    >>> model, tokens = build("rope", n_heads=2), torch.arange(8)[None]
    >>> before = model(tokens)
    >>> with ablated(model, [(0, 1)]):
    ...     during = model(tokens)
    >>> bool(torch.equal(before, during)), bool(torch.equal(before, model(tokens)))
    (False, True)

    Args:
        model: any model that ``host_of`` knows.
        heads: layer and head of each.

    Raises:
        ValueError: the model has no such layer or head.
    """
    host = host_of(model)
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(check_layer(host, layer), []).append(check_head(host, head))
    handles = []
    try:
        for layer, silent in by_layer.items():
            attn: Any = host.attn(layer)
            handles.append(attn.hook_z.register_forward_hook(_silencer(silent, host.n_heads)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _silencer(silent: list[int], n_heads: int) -> Any:
    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        shape = out.shape  # heads side by side, or on an axis of their own
        split = out.reshape(*shape[:2], n_heads, -1).clone()
        split[:, :, silent] = 0
        return split.reshape(shape)

    return hook
