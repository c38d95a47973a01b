"""TransformerBridge of TransformerLens 3.9 and 4.x over Hugging Face models.

Where the bridge rebuilds the attention its score hook carries the logits, masked pairs at the
dtype's minimum. Where it delegates to Hugging Face (OPT, BERT) the score hook carries the pattern,
and the reading recomputes the logits from q and k. Positions are shifted by ``position_ids``.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lenprobe.hosts.base import Geometry, Host, Projection, table_error, verify_table
from lenprobe.rotation import Rotation

_SCALES = ("scaling", "softmax_scale", "inv_norm_factor", "scale_attn")


class BridgeHost(Host):
    """A TransformerBridge over a Hugging Face model."""

    _verified: tuple[int, Tensor, Tensor, Rotation] | None = None
    """First position, tables and rotation of the layer read last."""

    @property
    def name(self) -> str:
        return "TransformerBridge"

    @property
    def architecture(self) -> str:
        return str(getattr(self.cfg, "architecture", None) or self.name)

    @property
    def hf_config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.original_model.config

    @property
    def causal(self) -> bool:
        return bool(getattr(self.attn(0), "is_causal", True)) and not self._encoder

    @property
    def _encoder(self) -> bool:
        config = self.hf_config
        return "bert" in str(getattr(config, "model_type", "")).lower() and not getattr(
            config, "is_decoder", False
        )

    def taps(self, layer: int) -> Mapping[str, nn.Module]:
        attn: Any = self.attn(layer)
        found = {"scores": attn.hook_attn_scores, "pattern": attn.hook_pattern}
        for role in ("q", "k"):
            if hasattr(attn, role):
                found[role] = getattr(attn, role).hook_out
            if hasattr(attn, f"hook_{role}_normed"):
                found[f"{role}_normed"] = getattr(attn, f"hook_{role}_normed")
        if hasattr(attn, "hook_cos"):
            found |= {"cos": attn.hook_cos, "sin": attn.hook_sin}
        return found

    def geometry(self, layer: int, kept: Mapping[str, Tensor], length: int) -> Geometry:
        source = self._source(layer)
        scale = next(
            (float(getattr(source, name)) for name in _SCALES if hasattr(source, name)),
            self.d_head**-0.5,
        )
        cap = getattr(source, "attn_logit_softcapping", None)
        return Geometry(
            rotation=self._rotation(layer, kept),
            scale=scale,
            soft_cap=None if cap is None else float(cap),
            biased=self.positions == "alibi",
        )

    def _source(self, layer: int) -> Any:
        """The Hugging Face attention module; BERT keeps its own inside ``self``."""
        source = getattr(self.attn(layer), "original_component", None)
        return getattr(source, "self", source)

    def _rotation(self, layer: int, kept: Mapping[str, Tensor]) -> Rotation | None:
        if "cos" not in kept:  # no rotary model, or a layer without positions (SmolLM3)
            return None
        cos, sin = kept["cos"][0], kept["sin"][0]
        if self._verified is not None:  # most layers turn by the same tables
            first, *tables, rotation = self._verified
            same = all(torch.equal(*each) for each in zip((cos, sin), tables, strict=True))
            if same and first == self.first_position:
                return rotation
        adjacent = bool(getattr(self.cfg, "rotary_adjacent_pairs", False))
        magnitude = float(torch.hypot(cos[0, 0].double(), sin[0, 0].double()))
        where = f"{self.architecture} layer {layer}"
        found = [
            Rotation.of(frequencies, adjacent=adjacent, magnitude=magnitude)
            for frequencies in self._frequencies(cos.shape[-1] // 2)
        ]
        if not found:
            raise ValueError(
                f"{where}: the model rotates queries and keys, but has no inverse frequencies that "
                "lenprobe can find (a buffer named *inv_freq)"
            )
        first = self.first_position
        best = min(found, key=lambda each: table_error(_halves(each), cos, sin, first=first))
        verify_table(_halves(best), cos, sin, first=first, where=where)
        self._verified = first, cos, sin, best
        return best

    def _frequencies(self, pairs: int) -> Iterator[np.ndarray]:
        """Every table of inverse frequencies that the model keeps."""
        for module in self._rotary_modules:
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and buffer.shape == (pairs,):
                    yield buffer.double().cpu().numpy()

    @cached_property
    def _rotary_modules(self) -> list[nn.Module]:
        """Found once, since it takes a walk over the whole model; what they hold may change."""
        every = self.model.original_model.modules()
        return [each for each in every if any(name.endswith("inv_freq") for name in each._buffers)]

    def window(self, layer: int) -> int | None:
        return getattr(self._source(layer), "sliding_window", None)

    def projection(self, layer: int, head: int) -> Projection:
        attn: Any = self.attn(layer)
        w_q, w_k = attn.W_Q, attn.W_K
        group = w_q.shape[0] // w_k.shape[0]
        zero = w_q.new_zeros(w_q.shape[-1])
        b_q, b_k = attn.b_Q, attn.b_K
        return Projection(
            w_q=w_q[head],
            w_k=w_k[head // group],
            b_q=zero if b_q is None else b_q.reshape(w_q.shape[0], -1)[head],
            b_k=zero if b_k is None else b_k.reshape(w_k.shape[0], -1)[head // group],
        )

    @contextlib.contextmanager
    def _shifted(self, shift: int, length: int, *, exact: bool) -> Iterator[Mapping[str, Any]]:
        positions = torch.arange(shift, shift + length, device=self.device)
        if self.positions == "alibi":  # the bias depends on the offset alone
            yield {}
            return
        if self.positions == "standard":
            self.check_rows(shift, length)
        handles = self._exact_tables(positions) if self.positions == "rotary" and exact else []
        try:
            yield {"position_ids": positions[None]}
        finally:
            for handle in handles:
                handle.remove()

    def _exact_tables(self, positions: Tensor) -> list[Any]:
        """Hooks that put float64-computed tables in place of the model's own."""
        handles = []
        for layer, rotation in self._rotations().items():
            halves = _halves(rotation)
            taps = self.taps(layer)
            for role, table in zip(
                ("cos", "sin"), halves.table(positions, torch.float64), strict=True
            ):
                rows = halves.host_layout(table)
                hook = partial(_in_place_of, rows)
                handles.append(taps[role].register_forward_hook(hook))
        return handles

    def _rotations(self) -> dict[int, Rotation]:
        """Every layer's rotation, from a short run; layers without one are left out."""
        kept: dict[int, dict[str, Tensor]] = {layer: {} for layer in range(self.n_layers)}
        handles = [
            self.taps(layer)[role].register_forward_hook(partial(_keep, kept[layer], role))
            for layer in range(self.n_layers)
            for role in ("cos", "sin")
            if role in self.taps(layer)
        ]
        try:
            self.run(torch.zeros(1, 4, dtype=torch.long, device=self.device))
        finally:
            for handle in handles:
                handle.remove()
        found = {layer: self._rotation(layer, tables) for layer, tables in kept.items()}
        return {layer: rotation for layer, rotation in found.items() if rotation is not None}


def _halves(rotation: Rotation) -> Rotation:
    """The rotation as its tables stand at the hooks: halves, expanded to pairs only afterwards."""
    return Rotation.of(rotation.frequencies, adjacent=False, magnitude=rotation.magnitude)


def _in_place_of(rows: Tensor, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return rows.to(out.dtype)[None].expand(out.shape[0], -1, -1)


def _keep(kept: dict[str, Tensor], role: str, module: nn.Module, args: Any, out: Tensor) -> None:
    kept[role] = out
