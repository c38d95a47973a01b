"""Every head of a model: which are positional, with which offset, how exactly, how far.

One forward pass a batch; each layer is reduced inside its own hook, so that at most one layer's n²
is held at a time, and every reading is verified as everywhere else. Two kinds of tokens answer two
questions: uniform random ones say what positions do by themselves, natural text what the head does
at work. Both are reported. Definitions: those of the single probes; see
``lenprobe.layer_figures``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.hosts import Host, cast, host_of
from lenprobe.layer_figures import LayerFigures, figures_of
from lenprobe.nulls import reinitialised
from lenprobe.probes.carrier import amplitudes_of, evaluate
from lenprobe.probes.decomposition import PARTS, Design
from lenprobe.probes.pinning import TIMES_WEIGHT
from lenprobe.probes.routing import routing_of
from lenprobe.probes.rule import MAJORITY
from lenprobe.reading import LayerReading, UnverifiedReading, stream
from lenprobe.results import Provenance, Result, tokens_hash
from lenprobe.rotation import Rotation
from lenprobe.scan_tokens import check_room, contents_for

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NEAR = 8
"""Offsets up to here count as near."""
_REACH = 8192  # offsets that a horizon is looked for in, by default
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan(Result):
    """One row a head and kind of tokens."""

    tokens: tuple[str, ...]
    """Of each row: ``random``, ``text`` or ``given``."""
    layer: Int[np.ndarray, " row"]
    head: Int[np.ndarray, " row"]
    columns: tuple[str, ...]
    """Names of ``values``; ``to_frame`` says what each is."""
    values: Float[np.ndarray, "row column"]
    usage: Float[np.ndarray, "row pair"]
    """Share of each rotary pair in ΣA; NaN where nothing rotates."""
    wavelengths: Float[np.ndarray, "row pair"]
    """2π/ω of each pair, in tokens."""
    failures: Mapping[str, str]
    """Layers that could not be verified, and why; they have no rows."""
    complete: bool
    """Whether every layer was reached on all tokens."""

    def summary(self) -> str:
        """The most positional heads of each kind of tokens."""
        frame = self.to_frame()
        lines = []
        for kind in dict.fromkeys(self.tokens):
            own = frame[frame["tokens"] == kind]
            found = own[own["found"]]
            offsets = found[(found["rule"] == "offset")]
            near = self.most_positional(5, tokens=kind)
            best = ", ".join(
                f"L{r.layer}H{r.head} offset {r.near} ({r.near_weight:.0%} of its weight)"
                for r in near.itertuples()
            )
            lines.append(
                f"{kind} tokens: {len(offsets)} of {len(own)} heads attend to one offset, "
                f"{len(found) - len(offsets)} to one slot; nearest and strongest: {best or 'none'}"
            )
        if self.failures:
            lines.append(f"layers that could not be verified: {', '.join(self.failures)}")
        if not self.complete:
            lines.append("interrupted: the layers scanned so far")
        return "\n".join(lines)

    def to_frame(self) -> "pd.DataFrame":
        """One row a head and kind of tokens.

        ``rule`` and ``number`` are the offset or slot that most queries choose, ``share`` how
        many, ``weight`` the mean attention there and ``uniform`` that of a uniform head;
        ``relative`` to ``content`` are shares of the logits' variance, ``spread`` its root in
        nats; ``peak``, ``alignment`` and ``horizon`` are those of the carrier at its peak or the
        rule's offset, ``closed_form`` its correlation with the measured relative part;
        ``equivariance`` is E at δ = 4096 in float32; ``wavelength`` the geometric mean over rotary
        pairs, weighted by amplitude; ``alpha N`` the share of queries up to N that keep the rule
        of the kernel's first quarter; ``near`` the offset of 1 to 8 with the most attention and
        ``near_weight`` how much (``near_uniform`` of a uniform head); ``previous`` the mean
        attention to the previous token.
        """
        import pandas as pd

        frame = pd.DataFrame(self.values, columns=[*self.columns])
        frame.insert(0, "tokens", self.tokens)
        frame.insert(1, "layer", self.layer)
        frame.insert(2, "head", self.head)
        slot = frame.pop("slot") == 1
        frame.insert(3, "rule", np.where(slot, "slot", "offset"))
        frame["number"] = frame["number"].astype(int)
        frame["near"] = frame["near"].astype(int)
        found = (frame["share"] > MAJORITY) & (frame["weight"] >= TIMES_WEIGHT * frame["uniform"])
        frame.insert(5, "found", found)
        return frame

    def most_positional(self, count: int, *, tokens: str | None = None) -> "pd.DataFrame":
        """The heads with the most attention at one near offset, strongest first.

        A head counts from twice a uniform head's attention on, whatever most of its queries do:
        many heads of real models rest on the first token and leave it for a near one.

        Args:
            count: how many rows.
            tokens: of this kind alone; the first kind scanned by default.
        """
        frame = self.to_frame()
        kind = self.tokens[0] if tokens is None and self.tokens else tokens
        own = frame[frame["tokens"] == kind]
        own = own[own["near_weight"] >= TIMES_WEIGHT * own["near_uniform"]]
        return own.sort_values("near_weight", ascending=False, kind="stable").head(count)

    def grid(self, column: str, tokens: str | None = None) -> Float[np.ndarray, "layer head"]:
        """A column by layer and head; NaN for layers that have no rows.

        Raises:
            ValueError: there is no such column, or no such kind of tokens.
        """
        kind = self.tokens[0] if tokens is None else tokens
        if column not in self.columns or kind not in self.tokens:
            raise ValueError(
                f"column={column!r}, tokens={tokens!r}: take one of {', '.join(self.columns)} and "
                f"of {', '.join(dict.fromkeys(self.tokens))}"
            )
        out = np.full((self.layer.max() + 1, self.head.max() + 1), np.nan)
        own = np.array([each == kind for each in self.tokens])
        out[self.layer[own], self.head[own]] = self.values[own, self.columns.index(column)]
        return out

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Attention at each head's own rule, by layer and head, of the first kind of tokens."""
        from lenprobe.plots import plot_heatmap

        return plot_heatmap(
            self.grid("weight"),
            row_label="layer",
            column_label="head",
            value_label="attention at the head's rule",
            ax=ax,
        )


def scan(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    text: str | None = None,
    length: int | None = None,
    batch: int = 4,
    train_length: int | None = None,
    reach: int | None = None,
    null: bool = False,
    swaps: int = 0,
    dtype: str = "float32",
    seed: int = 0,
    progress: bool = True,
) -> Scan:
    """Every head of every layer: its rule, shares, carrier, horizon, α.

    >>> from lenprobe.planted import carrier
    >>> found = scan(carrier(3).model, length=32, progress=False).to_frame()
    >>> found.loc[0, "rule"], int(found.loc[0, "number"])
    ('offset', 3)

    Args:
        model: any model that ``lenprobe.reading.host_of`` knows, a Hugging Face model too.
        tokens: int64 [batch, pos], two sequences or more. By default uniform random ones, special
            tokens left out, and beside them a passage of natural text where the model has a
            tokenizer.
        text: natural text in place of the passage and the random tokens.
        length: of the sequences made, in tokens; 512 by default, or the model's longest.
        batch: sequences a forward pass, 2 or more; also how many are made.
        train_length: the short grid that a head's own rule is read off for α, a quarter of the
            length by default. α is judged at twice that and at the length.
        reach: offsets that a horizon is looked for in.
        null: adds the figures of the same model at random initialisation on the same tokens, which
            takes as long again: ``null share``, ``null positional``, ``null near_weight``.
        swaps: for so many of the most positional heads, swap scores too, which take much longer.
        dtype: the weights are cast to for the scan: float32, float64 or bfloat16.
        seed: of the random tokens.
        progress: shows a progress bar over layers on standard error.

    Raises:
        ValueError: text shorter than the length, tokens outside the vocabulary, no room for one
            layer's logits; or an argument is out of its range.
    """
    host = host_of(model)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: take one of {', '.join(_DTYPES)}")
    sources = contents_for(host, tokens, text, length=length, batch=batch, seed=seed)
    n = next(iter(sources.values())).shape[1]
    check_room(host, n, batch)
    train_length = max(2, n // 4) if train_length is None else train_length
    if not 2 <= train_length < n:
        raise ValueError(f"train_length={train_length}: 2 to {n - 1}, below the length scanned")
    lengths = np.unique(np.minimum([2 * train_length, n], n))
    reach = max(n, min(host.n_ctx, _REACH)) if reach is None else reach
    if reach < n:
        raise ValueError(f"reach={reach}: {n} or more, the length scanned")
    run, blank = (
        _Run(host, train_length, lengths, sources, batch, progress=progress) for _ in range(2)
    )
    with cast(host.model, _DTYPES[dtype]):
        run.go()
        if null and run.complete:
            with reinitialised(host, seed=seed):
                blank.go()
    rows = [row for kind in sources for row in run.rows(kind, reach)]
    if null:
        _add_null(rows, [row for kind in sources for row in blank.rows(kind, reach)])
    if not rows:
        reasons = "; ".join(run.failures.values()) or "interrupted before the first layer"
        raise UnverifiedReading(f"{host.description}: no layer could be scanned: {reasons}")
    found = _assembled(host, rows, run, sources, lengths, dtype=dtype, seed=seed)
    return _with_swaps(found, model, sources, swaps, seed) if swaps else found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    tokens: str
    layer: int
    head: int
    values: dict[str, float]
    usage: Float[np.ndarray, " pair"]
    wavelengths: Float[np.ndarray, " pair"]


class _Run:
    """The passes, and what each layer left."""

    def __init__(
        self,
        host: Host,
        train_length: int,
        lengths: Int[np.ndarray, " length"],
        sources: Mapping[str, Tensor],
        batch: int,
        *,
        progress: bool,
    ) -> None:
        self.host, self.train_length, self.lengths = host, train_length, lengths
        self.sources, self.batch, self.progress = sources, batch, progress
        self.kept: dict[tuple[str, int], list[LayerFigures]] = {}
        self.geometry: dict[int, tuple[Rotation | None, float]] = {}
        self.uniform: dict[int, np.ndarray] = {}
        self.self_check: dict[tuple[str, int], float] = {}
        self.failures: dict[str, str] = {}
        self.complete = True

    def go(self) -> None:
        """Runs every batch; what is done when the user interrupts is kept."""
        from tqdm.auto import tqdm

        parts = [
            (kind, part)
            for kind, tokens in self.sources.items()
            for part in tokens.chunk(max(1, len(tokens) // self.batch))
        ]
        designs: dict[bytes, Design] = {}
        total = len(parts) * self.host.n_layers
        with tqdm(total=total, desc="scan", unit="layer", disable=not self.progress) as bar:
            try:
                for kind, part in parts:
                    self._pass(kind, part, designs, bar)
            except KeyboardInterrupt:
                self.complete = False

    def _pass(self, kind: str, part: Tensor, designs: dict[bytes, Design], bar: Any) -> None:
        def reduce(reading: LayerReading) -> None:
            layer = reading.layer
            self.geometry[layer] = reading.rotation, reading.scale
            count = reading.visible.sum(dim=-1).cpu().numpy()
            self.uniform[layer] = 1 / np.maximum(count, 1)
            worst = self.self_check.get((kind, layer), 0.0)
            self.self_check[kind, layer] = max(worst, reading.self_check)
            figures = figures_of(
                reading, train_length=self.train_length, lengths=self.lengths, designs=designs
            )
            self.kept.setdefault((kind, layer), []).append(figures)
            bar.update()

        def failed(layer: int, error: UnverifiedReading) -> None:
            self.failures[str(layer)] = str(error)
            bar.update()

        stream(self.host.model, part, reduce, on_failure=failed)

    def rows(self, kind: str, reach: int) -> list[_Row]:
        """One a head, of the layers that were verified on every batch so far."""
        found = []
        for (own, layer), figures in sorted(self.kept.items()):
            if own == kind and str(layer) not in self.failures:
                for head in range(len(figures[0].shares)):
                    found.append(self._row(kind, layer, head, figures, reach))
        return found

    def _row(
        self, kind: str, layer: int, head: int, figures: list[LayerFigures], reach: int
    ) -> _Row:
        follow = np.mean([each.follow[head] for each in figures], axis=0)
        weight = np.mean([each.weight[head] for each in figures], axis=0)
        n = (len(follow) + 1) // 3
        best = int(follow.argmax())
        slot = best >= 2 * n - 1
        number = best - (2 * n - 1 if slot else n - 1)
        energy = np.array([each.variance[head] for each in figures])
        shares = np.array([each.shares[head] for each in figures])
        mean = (energy @ shares / energy.sum()) if energy.sum() > 0 else shares.mean(axis=0)
        relative = np.mean([each.relative[head] for each in figures], axis=0)
        target = number if not slot and number >= 0 else None
        carrier = self._carrier(layer, head, figures, relative, target, reach)
        alphas = np.mean([each.carried[head] for each in figures], axis=0)
        values = {
            "slot": float(slot),
            "number": float(number),
            "share": float(follow[best]),
            "weight": float(weight[best]),
            "uniform": self._uniform(layer, number, n),
            "positional": float(mean[:3].sum()),
            **{name.split()[0]: float(share) for name, share in zip(PARTS, mean, strict=True)},
            "spread": float(np.sqrt(energy.mean())),
            **{name: value for name, value in carrier.items() if isinstance(value, float)},
            "equivariance": _worst([each.equivariance[head] for each in figures]),
            **{
                f"alpha {length}": float(share)
                for length, share in zip(self.lengths, alphas, strict=True)
            },
            "near": float(1 + weight[n : n + NEAR].argmax()),
            "near_weight": float(weight[n : n + NEAR].max()),
            "near_uniform": self._uniform(layer, 1 + int(weight[n : n + NEAR].argmax()), n),
            "previous": float(weight[n]),
            "self_check": self.self_check[kind, layer],
        }
        return _Row(
            tokens=kind,
            layer=layer,
            head=head,
            values=values,
            usage=carrier["usage"],
            wavelengths=carrier["wavelengths"],
        )

    def _uniform(self, layer: int, number: int, n: int) -> float:
        """What a uniform head has at an offset or slot, over the queries that can have it."""
        return float(self.uniform[layer][np.arange(max(number, 1), n)].mean())

    def _carrier(
        self,
        layer: int,
        head: int,
        figures: list[LayerFigures],
        relative: Float[np.ndarray, " offset"],
        target: int | None,
        reach: int,
    ) -> dict[str, Any]:
        """Peak, alignment and horizon of the closed form, or the peak of what was measured."""
        rotation, scale = self.geometry[layer]
        qs = [each.q[head] for each in figures if each.q is not None]
        ks = [each.k[head] for each in figures if each.k is not None]
        if rotation is None or not qs or not ks or not np.isfinite(relative).any():
            peak = float(np.nanargmax(relative)) if np.isfinite(relative).any() else math.nan
            nothing = dict.fromkeys(("alignment", "horizon", "closed_form", "wavelength"), math.nan)
            return {"peak": peak, **nothing, "usage": np.zeros(0), "wavelengths": np.zeros(0)}
        q, k = np.mean(qs, axis=0), np.mean(ks, axis=0)
        amplitudes, phases, omega, constant = amplitudes_of(q, k, rotation, scale)
        n = len(relative)
        kernel = evaluate(amplitudes, phases, omega, constant, reach)
        peak = int(kernel[:n].argmax())
        at = peak if target is None else target
        total = float(amplitudes.sum())
        beyond = np.flatnonzero(kernel[n:] >= kernel[at])
        seen = np.isfinite(relative) & (np.arange(n) >= 1)
        usage = amplitudes / total if total > 0 else np.zeros_like(amplitudes)
        flat = np.ptp(relative[seen]) == 0 or np.ptp(kernel[:n][seen]) == 0
        return {
            "peak": float(peak),
            "alignment": float(np.cos(omega * at + phases) @ usage),
            "horizon": float(n + beyond[0]) if len(beyond) else math.inf,
            "closed_form": math.nan
            if flat
            else float(np.corrcoef(kernel[:n][seen], relative[seen])[0, 1]),
            "wavelength": float(np.exp(usage @ np.log(2 * np.pi / omega))),
            "usage": usage,
            "wavelengths": 2 * np.pi / omega,
        }


def _add_null(rows: list[_Row], blank: list[_Row]) -> None:
    """Sets what a random head reaches beside each head; NaN where it was not read."""
    known = {(row.tokens, row.layer, row.head): row.values for row in blank}
    for row in rows:
        random = known.get((row.tokens, row.layer, row.head), {})
        for name in ("share", "positional", "near_weight"):
            row.values[f"null {name}"] = random.get(name, math.nan)


def _worst(values: Iterable[float]) -> float:
    found = np.array([*values])
    return float(found.max()) if np.isfinite(found).all() else math.nan


def _assembled(
    host: Host,
    rows: list[_Row],
    run: _Run,
    sources: Mapping[str, Tensor],
    lengths: Int[np.ndarray, " length"],
    **settings: Any,
) -> Scan:
    columns = tuple(rows[0].values)
    pairs = max(len(row.usage) for row in rows)
    usage, wavelengths = np.full((2, len(rows), pairs), np.nan)
    for index, row in enumerate(rows):
        usage[index, : len(row.usage)] = row.usage
        wavelengths[index, : len(row.usage)] = row.wavelengths
    every = next(iter(sources.values()))
    return Scan(
        provenance=Provenance(
            verb="scan",
            model=host.description,
            tokens_shape=tuple(every.shape),
            tokens_hash=tokens_hash(torch.cat([*sources.values()])),
            seed=settings["seed"],
            self_check=max(run.self_check.values()),
            settings={
                "dtype": settings["dtype"],
                "batch": run.batch,
                "train_length": run.train_length,
                "lengths": lengths.tolist(),
                "sequences": {kind: len(tokens) for kind, tokens in sources.items()},
            },
        ),
        tokens=tuple(row.tokens for row in rows),
        layer=np.array([row.layer for row in rows]),
        head=np.array([row.head for row in rows]),
        columns=columns,
        values=np.array([[row.values[name] for name in columns] for row in rows]),
        usage=usage,
        wavelengths=wavelengths,
        failures=dict(run.failures),
        complete=run.complete,
    )


def _cut(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "more shorter"]:
    """The same tokens as four times as many sequences, enough for an interval."""
    length = max(8, tokens.shape[1] // 4)
    whole = tokens[:, : tokens.shape[1] // length * length]
    return whole.reshape(-1, length)


def _with_swaps(
    found: Scan, model: Any, sources: Mapping[str, Tensor], count: int, seed: int
) -> Scan:
    """The scan with the swap scores of its most positional heads; NaN for the others."""
    scores = np.full((len(found.tokens), 2), np.nan)
    for kind, whole in sources.items():
        tokens = _cut(whole)
        for index in found.most_positional(count, tokens=kind).index:
            where = int(found.layer[index]), int(found.head[index])
            routing = routing_of(model, *where, tokens, seed=seed)
            scores[index] = routing.swap
    return replace(
        found,
        columns=(*found.columns, "swap positional", "swap symbolic"),
        values=np.concatenate([found.values, scores], axis=1),
    )
