"""HookedTransformer of TransformerLens 3.9.

Its score hook carries the logits: after scale, soft-cap and position bias, masked pairs −inf. It
has no ``position_ids``; positions are shifted by exchanging the rotary tables, or the rows that
the position embedding adds.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lenprobe.hosts.base import Geometry, Host, Projection, verify_table
from lenprobe.models import spec_of
from lenprobe.rotation import Rotation


class HookedHost(Host):
    """A HookedTransformer."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._rows: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        """Rows of the host's tables that shifts used; a far one takes a long table to make."""
        spec = spec_of(model)
        self.encoding = None if spec is None else spec.encoding
        if spec is not None:
            self.attention = spec.attention

    @property
    def name(self) -> str:
        return "HookedTransformer"

    @property
    def positions(self) -> str:
        return self.encoding or super().positions

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned at all (NoPE is a rotation of no dimensions)."""
        return self.cfg.positional_embedding_type == "rotary" and (self.cfg.rotary_dim or 0) > 0

    def taps(self, layer: int) -> Mapping[str, nn.Module]:
        attn: Any = self.attn(layer)
        # A cached ALiBi table makes equal inputs give logits that differ by a row constant.
        if self.cfg.positional_embedding_type == "alibi":
            attn.alibi = None
        found = {
            "q": attn.hook_q,
            "k": attn.hook_k,
            "scores": attn.hook_attn_scores,
            "pattern": attn.hook_pattern,
        }
        if attn.q_norm is not None:
            found |= {"q_normed": attn.q_norm, "k_normed": attn.k_norm}
        return found

    def geometry(self, layer: int, kept: Mapping[str, Tensor], length: int) -> Geometry:
        attn: Any = self.attn(layer)
        cap = float(self.cfg.attn_scores_soft_cap)
        rotation = None
        if self.rotary:
            rotation = self.rotation(layer)
            verify_table(
                rotation,
                attn.rotary_cos[:length],
                attn.rotary_sin[:length],
                first=self.first_position,
                where=f"{self.architecture} layer {layer}",
            )
        return Geometry(
            rotation=rotation,
            scale=1.0 / float(attn.attn_scale),
            soft_cap=cap if cap > 0 else None,
            biased=self.positions in ("alibi", "t5"),
        )

    def rotation(self, layer: int) -> Rotation:
        """The layer's rotation, by the host's own rule evaluated in float64."""
        sin, cos = self._host_table(layer, 2, torch.float64)
        pairs = self.cfg.rotary_dim // 2
        columns = slice(0, None, 2) if self.cfg.rotary_adjacent_pairs else slice(0, pairs)
        omega = torch.atan2(sin[1, columns], cos[1, columns])
        return Rotation.of(
            omega.cpu().numpy(),
            adjacent=bool(self.cfg.rotary_adjacent_pairs),
            magnitude=math.hypot(float(sin[0, 0]), float(cos[0, 0])),
        )

    def _host_table(self, layer: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        attn: Any = self.attn(layer)
        sin, cos = attn.calculate_sin_cos_rotary(
            self.cfg.rotary_dim, rows, base=attn._rotary_base(), dtype=dtype
        )
        return sin.to(self.device), cos.to(self.device)

    def tables_exact(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float64

    def projection(self, layer: int, head: int) -> Projection:
        attn: Any = self.attn(layer)
        return Projection(
            w_q=attn.W_Q[head], w_k=attn.W_K[head], b_q=attn.b_Q[head], b_k=attn.b_K[head]
        )

    def window(self, layer: int) -> int | None:
        return self.cfg.window_size if self.attn(layer).attn_type == "local" else None

    @contextlib.contextmanager
    def _shifted(self, shift: int, length: int, *, exact: bool) -> Iterator[Mapping[str, Any]]:
        kind = self.cfg.positional_embedding_type
        if kind == "rotary" and self.rotary:
            self._swap_tables(shift, length, exact=exact)
            yield {}
        elif kind == "standard":
            rows = self._position_rows(shift, length)
            handle = self.model.hook_pos_embed.register_forward_hook(
                lambda module, args, out: rows.to(out.dtype)[None].expand_as(out)
            )
            try:
                yield {}
            finally:
                handle.remove()
        elif kind in ("alibi", "rotary"):  # nothing in these models knows an absolute position
            yield {}
        else:
            raise ValueError(
                f"positional_embedding_type={kind!r} of {self.architecture} cannot be shifted; "
                "lenprobe shifts rotary, standard and alibi models"
            )

    @contextlib.contextmanager
    def _placed(self, positions: Tensor) -> Iterator[Mapping[str, Any]]:
        handle = self.model.hook_pos_embed.register_forward_hook(
            lambda module, args, out: self.model.W_pos[positions]
        )
        try:
            yield {}
        finally:
            handle.remove()

    def _swap_tables(self, shift: int, length: int, *, exact: bool) -> None:
        """Puts rows shift .. shift + length − 1 where rows 0 .. length − 1 were, in every layer."""
        made: dict[tuple[float, str], tuple[Tensor, Tensor]] = {}
        positions = torch.arange(shift, shift + length, device=self.device)
        for layer in range(self.n_layers):
            attn: Any = self.attn(layer)
            key = (float(attn._rotary_base()), attn.attn_type)
            if key not in made:
                if exact:
                    rotation = self.rotation(layer)
                    cos, sin = rotation.table(positions, self.dtype)
                    made[key] = rotation.host_layout(sin), rotation.host_layout(cos)
                else:
                    made[key] = self._host_rows(layer, shift, length)
            attn._buffers["rotary_sin"], attn._buffers["rotary_cos"] = made[key]

    def _host_rows(self, layer: int, shift: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows shift .. shift + length − 1 of the layer's own tables, in the model's dtype.

        The host computes half precision in float32 and rounds last (YaRN's factor aside), so one
        table serves all of these.
        """
        attn: Any = self.attn(layer)
        wide = torch.promote_types(self.dtype, torch.float32)
        made_in = self.dtype if self.cfg.use_yarn_rope else wide
        key = float(attn._rotary_base()), attn.attn_type, shift, length, made_in
        if key not in self._rows:
            sin, cos = self._host_table(layer, shift + length, made_in)
            self._rows[key] = sin[shift:].clone(), cos[shift:].clone()
        sin, cos = self._rows[key]
        return sin.to(self.dtype), cos.to(self.dtype)

    def _position_rows(self, shift: int, length: int) -> Tensor:
        if self.encoding is not None:
            from lenprobe import encodings

            rows = encodings.get(self.encoding).position_rows(self.model, shift, length)
            if rows is not None:
                return rows
        self.check_rows(shift, length)
        table: Tensor = self.model.W_pos
        return table[shift : shift + length]
