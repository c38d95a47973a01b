"""Small models to train and probe: one configuration an encoding, built, saved and loaded.

On TransformerLens 3.9 a model is a HookedTransformer. On 4.x, which has none, RoPE and learned
positions are native TransformerBridges with the same weights under another layout; the other
encodings, and attention without a softmax, need 3.9.
"""

import json
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lenprobe import encodings
from lenprobe.weights import set_weights, weights_of

Attention = Literal["softmax", "linear"]
NEEDS_HOOKED = 'pip install "transformer-lens>=3.9,<4"'

_FORMAT = 1
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_NORMS = (None, "LN", "LNPre", "RMS", "RMSPre")
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What lenprobe knows of a model that it built; ``spec_of(model)`` finds it."""

    encoding: str
    attention: Attention = "softmax"
    arguments: dict[str, Any]
    """What ``build`` was called with, in values that JSON has."""
    train_length: int | None = None
    """The longest sequence trained on; None before training."""
    task: str | None = None
    """The task trained on."""


def spec_of(model: Any) -> ModelSpec | None:
    """What lenprobe knows of the model; None where it did not build it."""
    spec = getattr(model, "lenprobe", None)
    return spec if isinstance(spec, ModelSpec) else None


def config(
    encoding: str,
    *,
    n_layers: int = 1,
    n_heads: int = 1,
    d_model: int = 32,
    d_head: int | None = None,
    d_vocab: int = 16,
    n_ctx: int = 256,
    rotary_base: float = 10000.0,
    rotary_dim: int | None = None,
    attn_only: bool = True,
    d_mlp: int | None = None,
    act_fn: str = "gelu",
    normalization_type: str | None = None,
    init_range: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Any:
    """The host's configuration of a small model with an encoding.

    >>> config("rope", rotary_dim=8).rotary_dim
    8

    Args:
        encoding: ``rope``, ``learned`` (absolute), ``learned_offset`` (the same, trained from
            random positions on), ``sinusoidal``, ``alibi``, ``t5`` (bucketed relative bias) or
            ``none``.
        n_layers: how many blocks.
        n_heads: attention heads a block.
        d_model: width of the residual stream.
        d_head: width of a head; d_model / n_heads by default.
        d_vocab: how many tokens.
        n_ctx: longest sequence; rows of a position table.
        rotary_base: RoPE's base; pair m turns by base^(−2m/rotary_dim) a position.
        rotary_dim: how many of a head's dimensions turn, even; all by default. RoPE alone has it.
        attn_only: no MLPs.
        d_mlp: width of the MLPs; 4 d_model by default.
        act_fn: of the MLPs.
        normalization_type: ``None``, ``"LN"``, ``"RMS"``, or either with ``Pre``.
        init_range: standard deviation of the weights; 0.8/√d_model by default.
        dtype: float32, float64 or bfloat16.
        device: where the weights go.
        seed: of the weights.

    Returns:
        A HookedTransformerConfig, or a TransformerBridgeConfig on TransformerLens 4.x.

    Raises:
        ValueError: the encoding is unknown, or arguments are out of their range; all are named.
    """
    kind = encodings.get(encoding)
    d_head = _head_width(d_model, n_heads) if d_head is None else d_head
    sizes = {"n_layers": n_layers, "n_heads": n_heads, "d_model": d_model, "d_head": d_head}
    sizes |= {"d_vocab": d_vocab, "n_ctx": n_ctx}
    faults = [_size_fault(name, value) for name, value in sizes.items()]
    faults += _rotary_faults(kind.name, d_head, rotary_dim, rotary_base)
    if normalization_type not in _NORMS:
        faults.append(f"normalization_type={normalization_type!r}: one of {_NORMS}")
    if dtype not in _DTYPES.values():
        faults.append(f"dtype={dtype}: torch.float32, torch.float64 or torch.bfloat16")
    if init_range is not None and not init_range > 0:
        faults.append(f"init_range={init_range}: above 0")
    if any(faults):
        raise ValueError("no such model; take " + "; ".join(fault for fault in faults if fault))
    fields = {
        **sizes,
        **kind.configure(
            d_head=d_head, rotary_base=rotary_base, rotary_dim=rotary_dim, n_ctx=n_ctx
        ),
        "attn_only": attn_only,
        "d_mlp": None if attn_only else d_mlp or 4 * d_model,
        "act_fn": act_fn,
        "normalization_type": normalization_type,
        "initializer_range": 0.8 / math.sqrt(d_model) if init_range is None else init_range,
        "dtype": dtype,
        "device": device,
        "seed": seed,
    }
    if _has_hooked():
        from transformer_lens import HookedTransformerConfig

        with _random_state_kept():
            return HookedTransformerConfig(**fields)
    _check_native(kind, rotary_base)
    from transformer_lens.config import TransformerBridgeConfig

    with _random_state_kept():
        return TransformerBridgeConfig(**fields)


def build(encoding: str, *, attention: Attention = "softmax", **arguments: Any) -> Any:
    """A small model with an encoding and random weights; equal arguments make equal weights.

    >>> model = build("rope", d_vocab=16)
    >>> model(torch.zeros(1, 4, dtype=torch.int64)).shape
    torch.Size([1, 4, 16])

    Args:
        encoding: as for :func:`config`.
        attention: ``"linear"`` takes the raw masked logits as the pattern, without a softmax.
        arguments: as for :func:`config`.

    Returns:
        A HookedTransformer, or a native TransformerBridge on TransformerLens 4.x.

    Raises:
        ValueError: as for :func:`config`; or this TransformerLens cannot build it, and the message
            names the one that can.
    """
    if attention not in ("softmax", "linear"):
        raise ValueError(f"attention={attention!r} is unknown; take 'softmax' or 'linear'")
    if attention == "linear" and not _has_hooked():
        raise ValueError(
            f"attention='linear' needs HookedTransformer, which {_installed()} no longer has; "
            f"install {NEEDS_HOOKED}"
        )
    cfg = config(encoding, **arguments)
    model = _hooked(cfg) if _has_hooked() else _native(cfg)
    encodings.get(encoding).install(model)
    if attention == "linear":
        from lenprobe.hosts.points import make_linear

        make_linear(model)
    plain = {key: _plain(value) for key, value in arguments.items()}
    model.lenprobe = ModelSpec(encoding=encoding, attention=attention, arguments=plain)
    return model


def save(model: Any, path: str | Path) -> Path:
    """Writes a model that ``build`` made to a folder: safetensors and a JSON configuration.

    Args:
        model: as ``build`` returned it, trained or not.
        path: the folder, made if missing. A model saved there before is replaced.

    Returns:
        The folder.

    Raises:
        ValueError: lenprobe did not build the model, or the folder holds other things.
    """
    from safetensors.torch import save_file

    spec = spec_of(model)
    if spec is None:
        raise ValueError(
            f"model is a {type(model).__name__} that lenprobe.build did not make; save it with the "
            "library that made it"
        )
    folder = Path(path)
    foreign = folder.exists() and (not folder.is_dir() or _foreign(folder))
    if foreign:
        raise ValueError(f"path={str(path)!r} holds other things; name a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"lenprobe_format": _FORMAT, **asdict(spec)}, indent=2) + "\n"
    # both files are whole before either takes its place
    save_file(weights_of(model), folder / f".{_WEIGHTS}")
    (folder / f".{_CONFIG}").write_text(text)
    for name in (_WEIGHTS, _CONFIG):
        (folder / f".{name}").replace(folder / name)
    return folder


def load(path: str | Path) -> Any:
    """The model that ``save`` wrote, under this or the other major version of TransformerLens.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: the folder holds a model of another kind, or weights that do not fit it.
    """
    from safetensors.torch import load_file

    folder = Path(path)
    missing = [name for name in (_WEIGHTS, _CONFIG) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"path={str(path)!r} has no {' and no '.join(missing)}; name a folder that "
            "lenprobe.save wrote"
        )
    fields = json.loads((folder / _CONFIG).read_text())
    if not isinstance(fields, dict) or fields.pop("lenprobe_format", None) != _FORMAT:
        raise ValueError(
            f"{folder / _CONFIG} is no configuration of lenprobe (format {_FORMAT}); name a folder "
            "that lenprobe.save wrote"
        )
    spec = ModelSpec(**fields)
    arguments = dict(spec.arguments)
    if "dtype" in arguments:
        arguments["dtype"] = _DTYPES[arguments["dtype"]]
    model = build(spec.encoding, attention=spec.attention, **arguments)
    set_weights(model, load_file(folder / _WEIGHTS))
    model.lenprobe = spec
    return model


def is_saved(path: str | Path) -> bool:
    """Whether ``save`` wrote to this folder."""
    config_file = Path(path) / _CONFIG
    return config_file.is_file() and "lenprobe_format" in config_file.read_text()


def _hooked(cfg: Any) -> Any:
    from transformer_lens import HookedTransformer

    with warnings.catch_warnings(), _random_state_kept():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        return HookedTransformer(cfg)


def _native(cfg: Any) -> Any:
    import transformer_lens.model_bridge.sources.native  # noqa: F401  (adds boot_native)
    from transformer_lens.model_bridge import TransformerBridge

    with _random_state_kept():
        return TransformerBridge.boot_native(cfg, device=cfg.device, dtype=cfg.dtype)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """The hosts seed the global generators of torch, NumPy and Python; they are put back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    plain, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the host's doing)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpy)  # noqa: NPY002


def _has_hooked() -> bool:
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


def _installed() -> str:
    from importlib.metadata import version

    return f"transformer-lens {version('transformer-lens')}"


def _check_native(kind: encodings.Encoding, rotary_base: float) -> None:
    if not kind.on_bridge and not kind.trains_with_offset:
        raise ValueError(
            f"encoding={kind.name!r} needs HookedTransformer, which {_installed()} no longer has; "
            f"take 'rope' or 'learned', or install {NEEDS_HOOKED}"
        )
    if rotary_base != int(rotary_base):
        raise ValueError(
            f"rotary_base={rotary_base}: {_installed()} cuts it to an integer; take one, or "
            f"install {NEEDS_HOOKED}"
        )


def _head_width(d_model: int, n_heads: int) -> int:
    if n_heads < 1 or d_model < 1 or d_model % n_heads:
        raise ValueError(
            f"d_model={d_model} does not divide into n_heads={n_heads} heads; give d_head, or a "
            "d_model that n_heads ≥ 1 divides"
        )
    return d_model // n_heads


def _size_fault(name: str, value: int) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole and value >= 1 else f"{name}={value!r}: a whole number, 1 or more"


def _rotary_faults(
    encoding: str, d_head: int, rotary_dim: int | None, rotary_base: float
) -> list[str]:
    if encoding != "rope":
        return [] if rotary_dim is None else [f"rotary_dim={rotary_dim} with encoding='rope' only"]
    faults = []
    turning = d_head if rotary_dim is None else rotary_dim
    if turning % 2 or not 2 <= turning <= d_head:
        faults.append(f"rotary_dim={turning}: an even number in 2..d_head={d_head}")
    if not rotary_base > 1:
        faults.append(f"rotary_base={rotary_base}: above 1")
    return faults


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _foreign(folder: Path) -> bool:
    return any(folder.iterdir()) and not is_saved(folder)
