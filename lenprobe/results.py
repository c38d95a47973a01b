"""What every result shares: where it came from, how it prints, how it is kept.

A result is a frozen dataclass of NumPy arrays and plain values. It prints its own summary, draws
itself, turns into a DataFrame, and goes to one safetensors file and back: the arrays as tensors,
the rest as JSON in the file's header. Nothing is pickled.
"""

import base64
import dataclasses
import hashlib
import html
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes

R = TypeVar("R", bound="Result")

_LISTED = 64  # numbers of an array that as_dict lists
_VERSIONED = ("lenprobe", "transformer-lens", "torch", "transformers", "numpy")


@cache
def _version(name: str) -> str:
    """Looked up once: the search goes through everything installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """The versions of what produced a result, by distribution name.

    >>> sorted(versions())[0]
    'lenprobe'
    """
    return {name: _version(name) for name in _VERSIONED}


def tokens_hash(tokens: "torch.Tensor") -> str:
    """The first 16 hex digits of the SHA-256 of the tokens as int64."""
    array = np.ascontiguousarray(tokens.detach().cpu().numpy().astype(np.int64))
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What produced a result: the question, the model, the head, the tokens, the versions."""

    verb: str
    model: str
    """Architecture and host, as the reading layer names them."""
    layer: int | None = None
    head: int | None = None
    tokens_shape: tuple[int, ...] | None = None
    tokens_hash: str | None = None
    seed: int | None = None
    self_check: float | None = None
    """Largest difference between the softmax of the logits read and the model's pattern."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def __str__(self) -> str:
        head = "" if self.layer is None else f" layer {self.layer} head {self.head}"
        tokens = "" if self.tokens_shape is None else f", tokens {list(self.tokens_shape)}"
        check = "" if self.self_check is None else f", self-check {self.self_check:.1e}"
        return f"{self.verb}: {self.model}{head}{tokens}{check}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Base of all results. Subclasses add fields and give ``summary``, ``to_frame``, ``plot``."""

    provenance: Provenance

    def summary(self) -> str:
        """The finding in at most three lines."""
        raise NotImplementedError

    def to_frame(self) -> "pd.DataFrame":
        """The numbers as a table, one row an observation."""
        raise NotImplementedError

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The finding as a picture; returns the Axes drawn on."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """The figures in plain values, arrays of up to 64 numbers as lists; longer ones left out.

        Numbers that are not finite stay so.
        """
        found = {name: value for name, value in _fields(self).items() if name != "provenance"}
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in found.items()
            if not isinstance(value, np.ndarray) or value.size <= _LISTED
        }
        return {**plain, "summary": self.summary()}

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        text = f"<pre>{html.escape(self.summary())}</pre>"
        source = f"<small>{html.escape(str(self.provenance))}</small>"
        return f'<div class="lenprobe">{text}{figure_html(self)}{source}</div>'

    def save(self, path: str | Path) -> Path:
        """Writes the result to one safetensors file; returns its path."""
        from safetensors.numpy import save_file

        arrays, plain = {}, {}
        for name, value in _fields(self).items():
            if isinstance(value, np.ndarray):
                arrays[name] = np.ascontiguousarray(value)
            else:
                plain[name] = value
        plain["provenance"] = dataclasses.asdict(self.provenance)
        header = {"class": type(self).__name__, "fields": json.dumps(plain, default=_plain)}
        path = Path(path)
        save_file(arrays, path, metadata=header)
        return path

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """The result that ``save`` wrote.

        Raises:
            ValueError: the file holds a result of another class.
        """
        from safetensors import safe_open

        with safe_open(Path(path), framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("class") != cls.__name__:
            raise ValueError(
                f"path={str(path)!r} holds a {header.get('class', 'file of another kind')}, "
                f"not a {cls.__name__}; load it with that class"
            )
        plain = json.loads(header["fields"])
        shape = plain["provenance"]["tokens_shape"]
        plain["provenance"]["tokens_shape"] = None if shape is None else tuple(shape)
        plain["provenance"] = Provenance(**plain["provenance"])
        for spec in dataclasses.fields(cls):
            if isinstance(plain.get(spec.name), list):
                plain[spec.name] = tuple(plain[spec.name])
        return cls(**arrays, **plain)


def figure_html(result: Result, width: int = 640) -> str:
    """The result's plot as an inline PNG, for a page that works with no network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    result.plot(figure.subplots())
    return figure_to_img(figure, width)


def figure_to_img(figure: Any, width: int = 640) -> str:
    """A matplotlib figure as an ``<img>`` element that carries its own PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    data = base64.b64encode(buffer.getvalue()).decode()
    style = f"display:block;max-width:{width}px;width:100%"
    return f'<img alt="plot" style="{style}" src="data:image/png;base64,{data}">'


def _fields(result: Result) -> dict[str, Any]:
    return {spec.name: getattr(result, spec.name) for spec in dataclasses.fields(result)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be kept in JSON")
