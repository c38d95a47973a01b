"""One adapter a host library. ``host_of`` finds the one that a model needs."""

from typing import Any
from weakref import WeakKeyDictionary

from lenprobe.hosts.base import Geometry as Geometry
from lenprobe.hosts.base import Host as Host
from lenprobe.hosts.base import Projection as Projection
from lenprobe.hosts.base import cast as cast
from lenprobe.hosts.base import untouched as untouched


def host_of(model: Any) -> Host:
    """The adapter for a model.

    Args:
        model: a HookedTransformer (TransformerLens 3.9) or a TransformerBridge (3.9 or 4.x), over a
            Hugging Face model or native; or a Hugging Face model itself, which is read through a
            bridge that shares its weights.

    Raises:
        TypeError: the model is compiled, so its hooks are dead, or of a kind that has no adapter.
    """
    _refuse_compiled(model)
    from transformer_lens.model_bridge import TransformerBridge

    if isinstance(model, TransformerBridge):
        from transformer_lens.model_bridge.sources.native import NativeModel

        if isinstance(model.original_model, NativeModel):
            from lenprobe.hosts.native import NativeHost

            return NativeHost(model)
        from lenprobe.hosts.bridge import BridgeHost

        return BridgeHost(model)
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # 4.x has only the bridge
        pass
    else:
        if isinstance(model, HookedTransformer):
            from lenprobe.hosts.hooked import HookedHost

            return HookedHost(model)
    wrapped = _bridge_over(model)
    if wrapped is not None:
        return host_of(wrapped)
    raise TypeError(
        f"model is a {type(model).__module__}.{type(model).__qualname__}; lenprobe reads "
        "HookedTransformer, TransformerBridge and Hugging Face models"
    )


_BRIDGES: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""The bridge over each Hugging Face model that was read, as long as the model lives."""


def _bridge_over(model: Any) -> Any:
    """A bridge over a Hugging Face model; None for other things."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    if model not in _BRIDGES:
        from lenprobe.pretrained import wrap

        _BRIDGES[model] = wrap(model)
    return _BRIDGES[model]


def _refuse_compiled(model: Any) -> None:
    compiled = hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None
        for module in getattr(model, "modules", tuple)()
    )
    if compiled:
        raise TypeError(
            "model is compiled (torch.compile): hooks added now would silently never fire. Pass "
            "the module it was compiled from: model._orig_mod, or a copy made before "
            "model.compile()"
        )
