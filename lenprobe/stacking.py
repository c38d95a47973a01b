"""Training many models of one shape at once: their weights stacked, one more axis in front.

A small model leaves most of a core idle, since every operation on it costs more to start than to
do. So the models of one cell, which differ in their seeds alone, go through each operation
together as batched matrix products. Each still sees its own batches, drawn from its own seed, has
its own loss, and stops on its own; the course is that of :func:`lenprobe.training.fit`, up to
floating point. Afterwards they are ordinary models again. Definition: ours.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe import encodings
from lenprobe.encodings.alibi import slopes
from lenprobe.encodings.t5 import MAX_DISTANCE, bucket_of
from lenprobe.hosts import host_of
from lenprobe.models import ModelSpec, spec_of
from lenprobe.results import Provenance
from lenprobe.tasks import IGNORE, TokenTask
from lenprobe.training import (
    SOLVED,
    WINDOW,
    History,
    bar,
    check_lengths,
    check_settings,
    cosine,
    draw,
    fit,
)
from lenprobe.weights import set_weights, trainable, weights_of


def fit_many(
    models: Sequence[Any],
    task: TokenTask,
    lengths: Iterable[int],
    steps: int = 2000,
    *,
    seeds: Sequence[int] | None = None,
    batch: int = 32,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.0,
    solved: float | None = SOLVED,
    progress: bool = True,
) -> list[History]:
    """Trains all models in place, as ``fit`` would each alone; returns the course of each loss.

    >>> from lenprobe import build, FixedOffset
    >>> models = [build("rope", seed=seed) for seed in range(3)]
    >>> [each.steps for each in fit_many(models, FixedOffset(1), [8], steps=20, progress=False)]
    [20, 20, 20]

    Models without MLPs and norms, with a softmax, as ``build`` makes them, go through each step
    together; others are trained one after another, with the same result.

    Args:
        models: of one shape and encoding; ``build`` with different seeds makes them.
        task: gives the sequences and the right tokens.
        lengths: sequence lengths to train on; each model draws its own at each step.
        steps: most optimiser steps of a model.
        seeds: of lengths, sequences and first positions, one a model; 0, 1, 2, ... by default.
        batch: sequences a step and model.
        learning_rate: of AdamW at the start; it falls to 0 along a cosine over ``steps``.
        weight_decay: of AdamW.
        solved: a model stops once the mean of its last 100 losses is below this, in nats.
        progress: shows a progress bar on standard error.

    Raises:
        ValueError, TypeError: the models differ in more than their weights, or an argument is out
            of its range; the models are as they were.
    """
    models = list(models)
    seeds = list(range(len(models))) if seeds is None else [int(seed) for seed in seeds]
    _check_models(models, seeds)
    lengths = check_lengths(lengths, task, host_of(models[0]))
    check_settings(steps, batch, learning_rate, weight_decay)
    settings: dict[str, Any] = {
        "batch": batch,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "solved": solved,
    }
    if not all(is_stackable(model) for model in models):
        pairs = bar(zip(models, seeds, strict=True), task.name, progress, total=len(models))
        return [
            fit(model, task, lengths, steps, seed=seed, progress=False, **settings)
            for model, seed in pairs
        ]
    courses = _train(models, task, lengths, steps, seeds, progress=progress, **settings)
    for model in models:
        model.lenprobe = replace(model.lenprobe, train_length=max(lengths), task=task.name)
    return [
        History(
            provenance=Provenance(
                verb="fit_many",
                model=host_of(model).description,
                seed=seed,
                settings={
                    "task": task.name,
                    "lengths": lengths,
                    "steps": steps,
                    "stacked": len(models),
                    **settings,
                },
            ),
            loss=course.loss,
            length=course.length,
            solved=course.solved,
        )
        for model, seed, course in zip(models, seeds, courses, strict=True)
    ]


def is_stackable(model: Any) -> bool:
    """Whether models of this shape can go through each step together."""
    spec, cfg = spec_of(model), model.cfg
    plain = cfg.attn_only and cfg.normalization_type is None
    return spec is not None and spec.attention == "softmax" and bool(plain)


# --- the weights of all models ------------------------------------------------------------------


class Stack:
    """The weights of models of one shape, and the logits that they make.

    Q, K and V of a layer lie side by side in one matrix, [model, d_model, 3 · head · d_head].
    """

    def __init__(self, models: Sequence[Any], longest: int) -> None:
        own = [weights_of(model) for model in models]
        self._stacked = {name: torch.stack([each[name] for each in own]) for name in own[0]}
        cfg = models[0].cfg
        spec = spec_of(models[0])
        assert spec is not None  # is_stackable
        self.encoding = spec.encoding
        self.n_layers, self.n_heads, self.d_head = cfg.n_layers, cfg.n_heads, cfg.d_head
        self.scale = 1 / math.sqrt(cfg.d_head)
        self.alive = torch.arange(len(models))
        free = trainable(models[0])
        self.weights = {name: value.contiguous() for name, value in self._packed().items()}
        for name, value in self.weights.items():
            value.requires_grad_(_canonical(name) in free)
        dtype, device = self.weights["embed.W_E"].dtype, self.weights["embed.W_E"].device
        self.mask = torch.full((longest, longest), -math.inf, dtype=dtype, device=device).triu(1)
        self._prepare_positions(cfg, longest)

    def parameters(self) -> list[Tensor]:
        """Those that are trained."""
        return [value for value in self.weights.values() if value.requires_grad]

    def logits(
        self, tokens: Int[Tensor, "model batch pos"], first: Int[Tensor, "model batch"] | None
    ) -> Float[Tensor, "model batch_pos d_vocab"]:
        """What each model says to its own sequences, which begin at position 0 or ``first``."""
        weights, (count, batch, length) = self.weights, tokens.shape
        table = weights["embed.W_E"]
        hot = torch.nn.functional.one_hot(tokens.view(count, -1), table.shape[1]).to(table.dtype)
        stream = torch.bmm(hot, table)
        if "pos_embed.W_pos" in weights:
            stream = stream + self._position_rows(batch, length, first)
        for layer in range(self.n_layers):
            mixed = self._attention(layer, stream, batch, length)
            stream = stream + torch.baddbmm(weights[f"{layer}.b_O"], mixed, weights[f"{layer}.W_O"])
        return torch.baddbmm(weights["unembed.b_U"], stream, weights["unembed.W_U"])

    def keep(self, rows: Int[Tensor, " row"], optimiser: torch.optim.Optimizer) -> None:
        """Goes on with some of the models; the others keep the weights that they have."""
        self._write_back()
        self.alive = self.alive[rows]
        for name, old in self.weights.items():
            new = old.detach()[rows].requires_grad_(old.requires_grad)
            self.weights[name] = new
            if old in optimiser.state:
                optimiser.state[new] = {
                    key: value if key == "step" else value[rows]
                    for key, value in optimiser.state.pop(old).items()
                }
        optimiser.param_groups[0]["params"] = self.parameters()

    def unstacked(self) -> list[dict[str, Tensor]]:
        """The weights of each model, by the names of ``weights_of``."""
        self._write_back()
        count = len(self._stacked["embed.W_E"])
        return [{name: value[i] for name, value in self._stacked.items()} for i in range(count)]

    def _attention(
        self, layer: int, stream: Float[Tensor, "model batch_pos d_model"], batch: int, length: int
    ) -> Float[Tensor, "model batch_pos head_d_head"]:
        weights, count = self.weights, len(stream)
        qkv = torch.baddbmm(weights[f"{layer}.b_QKV"], stream, weights[f"{layer}.W_QKV"])
        qkv = qkv.view(count * batch, length, 3, self.n_heads, self.d_head)
        q, k = self._turned(qkv[:, :, :2]).unbind(2)
        q, k, v = (self._by_head(each) for each in (q, k, qkv[:, :, 2]))
        scores = torch.baddbmm(self.mask[:length, :length], q, k.transpose(1, 2), alpha=self.scale)
        bias = self._bias(layer, length)
        if bias is not None:
            shape = (count, batch, self.n_heads, length, length)
            scores = (scores.view(shape) + bias).view(-1, length, length)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), v)
        mixed = mixed.view(count * batch, self.n_heads, length, self.d_head).transpose(1, 2)
        return mixed.reshape(count, batch * length, self.n_heads * self.d_head)

    def _by_head(
        self, x: Float[Tensor, "model_batch pos head d_head"]
    ) -> Float[Tensor, "model_batch_head pos d_head"]:
        return x.transpose(1, 2).reshape(-1, x.shape[1], self.d_head)

    # --- positions ---

    def _prepare_positions(self, cfg: Any, longest: int) -> None:
        index = torch.arange(longest, device=self.mask.device)
        distance = (index[:, None] - index).clamp(min=0)
        self.turn: Tensor | None = None
        if self.encoding == "rope":
            omega = cfg.rotary_base ** (-np.arange(0, cfg.rotary_dim, 2) / cfg.rotary_dim)
            angles = torch.from_numpy(np.multiply.outer(np.arange(longest), omega))
            turn = torch.polar(torch.ones_like(angles), angles)
            wide = self.mask.dtype == torch.float64
            turn = turn.to(torch.complex128 if wide else torch.complex64)
            self.turn = turn[:, None, None].to(self.mask.device)
        elif self.encoding == "alibi":
            slope = torch.from_numpy(slopes(self.n_heads)).to(self.mask)
            self.distance_bias = -slope[:, None, None] * distance.to(slope)
        elif self.encoding == "t5":
            buckets = bucket_of(np.arange(MAX_DISTANCE + 1))
            self.bucket = torch.from_numpy(buckets)[distance.clamp(max=MAX_DISTANCE).cpu()]

    def _turned(
        self, x: Float[Tensor, "model_batch pos two head d_head"]
    ) -> Float[Tensor, "model_batch pos two head d_head"]:
        """Q and k turned to their positions, adjacent dimensions being one complex number."""
        if self.turn is None:
            return x
        turning = 2 * self.turn.shape[-1]
        pairs = torch.view_as_complex(x[..., :turning].unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self.turn[: x.shape[1]]).flatten(-2)
        return turned if turning == x.shape[-1] else torch.cat([turned, x[..., turning:]], dim=-1)

    def _position_rows(
        self, batch: int, length: int, first: Int[Tensor, "model batch"] | None
    ) -> Float[Tensor, "model batch_pos d_model"]:
        table = self.weights["pos_embed.W_pos"]
        if first is None:
            return repeat(table[:, :length], "model pos d -> model (batch pos) d", batch=batch)
        count, rows, _ = table.shape
        at = first[:, :, None] + torch.arange(length, device=first.device)
        at = at.clamp(max=rows - 1)  # only what fills up a short sequence stands beyond
        at = at + rows * torch.arange(count, device=first.device)[:, None, None]
        return torch.nn.functional.embedding(at.view(count, -1), table.flatten(0, 1))

    def _bias(
        self, layer: int, length: int
    ) -> Float[Tensor, "#model #batch head query key"] | None:
        """What the encoding adds to the logits."""
        if self.encoding == "alibi":
            return self.distance_bias[None, None, :, :length, :length]
        if self.encoding == "t5":
            table = self.weights[f"{layer}.bias"]
            found = table[:, self.bucket[:length, :length]]
            return rearrange(found, "model query key head -> model 1 head query key")
        return None

    # --- to and from the layout of one model ---

    def _packed(self) -> dict[str, Tensor]:
        plain = self._stacked
        names = ["embed.W_E", "unembed.W_U"]
        if self.encoding in ("learned", "learned_offset", "sinusoidal"):
            names.append("pos_embed.W_pos")
        packed = {name: plain[name].clone() for name in names}
        packed["unembed.b_U"] = rearrange(plain["unembed.b_U"], "model v -> model 1 v").clone()
        for layer in range(self.n_layers):
            attn = f"blocks.{layer}.attn"
            packed[f"{layer}.W_QKV"] = torch.cat(
                [
                    rearrange(plain[f"{attn}.W_{x}"], "model head d k -> model d (head k)")
                    for x in "QKV"
                ],
                dim=2,
            )
            packed[f"{layer}.b_QKV"] = torch.cat(
                [
                    rearrange(plain[f"{attn}.b_{x}"], "model head k -> model 1 (head k)")
                    for x in "QKV"
                ],
                dim=2,
            )
            packed[f"{layer}.W_O"] = plain[f"{attn}.W_O"].flatten(1, 2).clone()
            packed[f"{layer}.b_O"] = plain[f"{attn}.b_O"][:, None].clone()
            if self.encoding == "t5":
                packed[f"{layer}.bias"] = plain[_canonical(f"{layer}.bias")].clone()
        return packed

    def _write_back(self) -> None:
        """The weights at work into the copies that have each model's layout."""
        plain, rows = self._stacked, self.alive
        for name, tensor in self.weights.items():
            value = tensor.detach()
            layer, _, leaf = name.partition(".")
            if leaf in ("W_QKV", "b_QKV"):
                pattern = "model d (x head k) -> x model head d k"
                parts = rearrange(value, pattern, x=3, head=self.n_heads)
                for x, part in zip("QKV", parts, strict=True):
                    part = part if leaf == "W_QKV" else part[:, :, 0]
                    plain[f"blocks.{layer}.attn.{leaf[0]}_{x}"][rows] = part
            else:
                target = plain[_canonical(name)]
                target[rows] = value.reshape(len(rows), *target.shape[1:])


def _canonical(name: str) -> str:
    """The name, or one of the names, that a packed weight has in a model."""
    layer, _, leaf = name.partition(".")
    if not layer.isdecimal():
        return name
    renamed = {"W_QKV": "W_Q", "b_QKV": "b_Q", "bias": "hook_attn_scores.bias.weight"}
    return f"blocks.{layer}.attn.{renamed.get(leaf, leaf)}"


# --- the course ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Course:
    loss: Float[np.ndarray, " step"]
    length: Int[np.ndarray, " step"]
    solved: bool


def _train(
    models: Sequence[Any],
    task: TokenTask,
    lengths: list[int],
    steps: int,
    seeds: Sequence[int],
    *,
    batch: int,
    learning_rate: float,
    weight_decay: float,
    solved: float | None,
    progress: bool,
) -> list[_Course]:
    stack = Stack(models, max(lengths))
    host = host_of(models[0])
    offset = encodings.get(stack.encoding).trains_with_offset
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    optimiser = torch.optim.AdamW(
        stack.parameters(), learning_rate, weight_decay=weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, cosine(steps))
    losses = np.full((steps, len(models)), np.nan)
    drawn = np.zeros((steps, len(models)), dtype=np.int64)
    taken = np.full(len(models), steps)
    title = f"training {len(models)} × {task.name}"
    for step in bar(range(steps), title, progress):
        alive = stack.alive.numpy()
        batches = [
            draw(task, lengths, batch, host.n_ctx, offset, generators[index]) for index in alive
        ]
        tokens, targets = _padded([each for each, _ in batches], task, max(lengths))
        first = torch.stack([each for _, each in batches if each is not None]) if offset else None
        loss = _losses(stack, tokens, targets, first, host.device)
        optimiser.zero_grad(set_to_none=True)
        loss.sum().backward()
        optimiser.step()
        schedule.step()
        losses[step, alive] = loss.detach().cpu().numpy()
        drawn[step, alive] = [each.shape[1] for each, _ in batches]
        if solved is not None and step + 1 >= WINDOW:
            mean = losses[step + 1 - WINDOW : step + 1, alive].mean(axis=0)
            going = np.flatnonzero(~(mean < solved))
            if len(going) < len(alive):
                taken[alive[mean < solved]] = step + 1
                stack.keep(torch.from_numpy(going), optimiser)
        if not len(stack.alive):
            break
    for model, weights in zip(models, stack.unstacked(), strict=True):
        set_weights(model, weights)
    done = np.ones(len(models), dtype=bool)
    done[stack.alive.numpy()] = False
    return [
        _Course(loss=losses[:end, i], length=drawn[:end, i], solved=bool(done[i]))
        for i, end in enumerate(taken)
    ]


def _padded(
    parts: list[Tensor], task: TokenTask, longest: int
) -> tuple[Int[Tensor, "model batch pos"], Int[Tensor, "model batch pos"]]:
    """Tokens and targets of all models, filled up behind, where no causal query sees it."""
    shape = (len(parts), parts[0].shape[0], longest)
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE)
    by_length: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        by_length.setdefault(part.shape[1], []).append(index)
    for length, rows in by_length.items():
        together = torch.cat([parts[index] for index in rows])
        answer = task.targets(together)
        tokens[rows, :, :length] = together.view(len(rows), -1, length)
        targets[rows, :, :length] = answer.view(len(rows), -1, length)
    return tokens, targets


def _losses(
    stack: Stack,
    tokens: Int[Tensor, "model batch pos"],
    targets: Int[Tensor, "model batch pos"],
    first: Int[Tensor, "model batch"] | None,
    device: torch.device,
) -> Float[Tensor, " model"]:
    """Each model's mean cross-entropy over the queries that are asked, in nats."""
    tokens, targets = tokens.to(device), targets.to(device)
    first = None if first is None else first.to(device)
    logits = stack.logits(tokens, first)
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    asked = (targets != IGNORE).flatten(1).sum(dim=1)
    return each.view(len(tokens), -1).sum(dim=1) / asked


def _check_models(models: Sequence[Any], seeds: Sequence[int]) -> None:
    if not models:
        raise ValueError("models is empty; give at least one")
    if len({id(model) for model in models}) < len(models):
        raise ValueError("models holds one model twice; each is trained once, so give others")
    if len(seeds) != len(models):
        raise ValueError(
            f"seeds has {len(seeds)} entries for {len(models)} models; give one a model"
        )
    shapes = {repr(_shape(spec_of(model))) for model in models}
    if len(shapes) > 1:
        raise ValueError(
            f"models are of {len(shapes)} shapes; models trained together differ in their seeds "
            "alone, so call fit_many once a shape"
        )


def _shape(spec: ModelSpec | None) -> Any:
    if spec is None:
        return None
    arguments = {name: value for name, value in spec.arguments.items() if name != "seed"}
    return spec.encoding, spec.attention, sorted(arguments.items(), key=lambda item: item[0])
