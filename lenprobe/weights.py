"""The weights of a small model by one set of names, whichever host holds them.

The names are those of HookedTransformer (``blocks.0.attn.W_Q``, [head, d_model, d_head]). A native
bridge keeps the same numbers in ``nn.Linear`` layers, heads side by side and outputs first; here
they are turned, so that what one host saved another can load.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

_DERIVED = ("rotary_sin", "rotary_cos", "mask", "IGNORE")
"""Buffers that the configuration decides; a saved copy would outlive it."""

_NATIVE = {
    "embed.W_E": "tok_embed.weight",
    "pos_embed.W_pos": "pos.weight",
    "unembed.W_U": "head.weight",
    "unembed.b_U": "head.bias",
    "ln_final.w": "ln_out.weight",
    "ln_final.b": "ln_out.bias",
}
_NATIVE_BLOCK = {
    **{
        f"attn.{ours}": f"attn.{theirs}"
        for ours, theirs in (
            ("W_Q", "q.weight"),
            ("W_K", "k.weight"),
            ("W_V", "v.weight"),
            ("W_O", "o.weight"),
            ("b_Q", "q.bias"),
            ("b_K", "k.bias"),
            ("b_V", "v.bias"),
            ("b_O", "o.bias"),
        )
    },
    **{
        f"ln{n}.{ours}": f"ln{n}.{theirs}"
        for n in (1, 2)
        for ours, theirs in (("w", "weight"), ("b", "bias"))
    },
    "mlp.W_in": "mlp.fc_in.weight",
    "mlp.b_in": "mlp.fc_in.bias",
    "mlp.W_out": "mlp.fc_out.weight",
    "mlp.b_out": "mlp.fc_out.bias",
}


_PROJECTION = "head d_model d_head", "(head d_head) d_model"
_BIAS = "head d_head", "(head d_head)"
_LAYOUTS = {
    "W_Q": _PROJECTION,
    "W_K": _PROJECTION,
    "W_V": _PROJECTION,
    "W_O": ("head d_head d_model", "d_model (head d_head)"),
    "b_Q": _BIAS,
    "b_K": _BIAS,
    "b_V": _BIAS,
    "W_U": ("d_model d_vocab", "d_vocab d_model"),
    "W_in": ("d_model d_mlp", "d_mlp d_model"),
    "W_out": ("d_mlp d_model", "d_model d_mlp"),
}
"""Ours and the native layout, where they differ."""


def weights_of(model: Any) -> dict[str, Tensor]:
    """Copies of all weights, by HookedTransformer's names and shapes."""
    return {
        name: _turned(name, tensor.detach(), model, inward=True).clone().contiguous()
        for name, tensor in _own(model)
    }


def trainable(model: Any) -> set[str]:
    """The names, of those in ``weights_of``, that training changes."""
    return {name for name, tensor in _own(model) if tensor.requires_grad}


def set_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Gives the model these weights; all of its own must be named, and no others.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape; nothing is changed then.
    """
    own = dict(_own(model))
    shapes = {name: _turned(name, tensor, model, inward=True).shape for name, tensor in own.items()}
    faults = [f"{name} is missing" for name in own.keys() - weights.keys()]
    for name, tensor in weights.items():
        if name not in own:
            faults.append(f"{name} has no place in the model")
        elif tensor.shape != shapes[name]:
            faults.append(f"{name} is {list(tensor.shape)}, not {list(shapes[name])}")
    if faults:
        raise ValueError("these weights do not fit the model: " + "; ".join(sorted(faults)))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_turned(name, weights[name], model, inward=False))


def _is_native(model: Any) -> bool:
    return isinstance(getattr(model, "original_model", None), nn.Module)


def _own(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's own tensors, in its own layout, by our names."""
    if not _is_native(model):
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not name.endswith(_DERIVED):
                yield name, tensor
        return
    source = model.original_model
    plain = {
        name.replace("._original_component", ""): tensor
        for name, tensor in (*source.named_parameters(), *source.named_buffers())
    }
    for ours, theirs in _NATIVE.items():
        if theirs in plain:
            yield ours, plain[theirs]
    for layer in range(model.cfg.n_layers):
        for ours, theirs in _NATIVE_BLOCK.items():
            if f"layers.{layer}.{theirs}" in plain:
                yield f"blocks.{layer}.{ours}", plain[f"layers.{layer}.{theirs}"]


def _turned(name: str, tensor: Tensor, model: Any, *, inward: bool) -> Tensor:
    """The tensor from the host's layout to ours (inward), or back."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf not in _LAYOUTS or not _is_native(model):
        return tensor
    ours, theirs = _LAYOUTS[leaf]
    pattern = f"{theirs} -> {ours}" if inward else f"{ours} -> {theirs}"
    sizes = {"d_head": model.cfg.d_head} if "d_head" in pattern else {}
    return rearrange(tensor, pattern, **sizes)
