"""Native TransformerBridge: the small models that TransformerLens builds from scratch.

The attention is delegated, so the score hook carries the pattern and the reading recomputes the
logits from q and k. Pairs are adjacent. The position table and the rotary tables end at ``n_ctx``;
for shifts the rotary tables are exchanged, so that any position can be had.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lenprobe.hosts.base import Geometry, verify_table
from lenprobe.hosts.bridge import BridgeHost
from lenprobe.rotation import Rotation


class NativeHost(BridgeHost):
    """A TransformerBridge over TransformerLens's own native model."""

    @property
    def name(self) -> str:
        return "native TransformerBridge"

    @property
    def causal(self) -> bool:
        return bool(self.cfg.attention_dir == "causal")

    def window(self, layer: int) -> int | None:
        return None

    def geometry(self, layer: int, kept: Mapping[str, Tensor], length: int) -> Geometry:
        source = self._source(layer)
        cap = float(source.attn_scores_soft_cap)
        rotation = None
        if source.rotary is not None:
            rotation = self.rotation
            verify_table(
                rotation,
                source.rotary.cos_cached[:length],
                source.rotary.sin_cached[:length],
                first=self.first_position,
                where=f"{self.architecture} layer {layer}",
            )
        return Geometry(
            rotation=rotation,
            scale=1.0 / float(source.scale),
            soft_cap=cap if cap > 0 else None,
        )

    @cached_property
    def rotation(self) -> Rotation:
        """The model's rotation: the plain rule in float64, or a scaled one as its table has it."""
        rotary = self.model.original_model.rotary
        pairs = rotary.rotary_dim // 2
        exponents = np.arange(pairs) / pairs
        omega = float(rotary.effective_base) ** -exponents / float(rotary.position_scale)
        table = torch.atan2(rotary.sin_cached[1, ::2].double(), rotary.cos_cached[1, ::2].double())
        if not np.allclose(table.cpu().numpy(), omega, rtol=1e-6, atol=0):  # llama3 scaling
            omega = table.cpu().numpy()
        return Rotation.of(
            omega,
            adjacent=True,
            magnitude=math.hypot(float(rotary.sin_cached[0, 0]), float(rotary.cos_cached[0, 0])),
        )

    @contextlib.contextmanager
    def _shifted(self, shift: int, length: int, *, exact: bool) -> Iterator[Mapping[str, Any]]:
        positions = torch.arange(shift, shift + length, device=self.device)
        rotary = self.model.original_model.rotary
        if rotary is None:
            self.check_rows(shift, length)
            yield {"position_ids": positions[None]}
            return
        rotation = self.rotation
        cos, sin = rotation.table(positions, self.dtype, exact=exact)
        kept = rotary.cos_cached, rotary.sin_cached
        rotary.cos_cached, rotary.sin_cached = rotation.host_layout(cos), rotation.host_layout(sin)
        try:
            yield {}
        finally:
            rotary.cos_cached, rotary.sin_cached = kept
