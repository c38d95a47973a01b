"""What a head's q and k say of contents it was read on, so that logits elsewhere can be drawn.

A query and its keys are drawn from those observed, each with the token it stood on. For a head
whose positions act on q and k from outside (a rotation, a bias of the offset, none) that gives the
logits at any offset, on sequences that were never run.
"""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lenprobe.hosts import Host
from lenprobe.reading import LayerReading
from lenprobe.rotation import Rotation

_FLOATS = 2**22  # held at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """Queries and keys of one head, unrotated, with the tokens that they stand on."""

    q: Float[Tensor, "content d_head"]
    k: Float[Tensor, "content d_head"]
    """The key at the query's own position, as it stands at position 0."""
    tokens: Int[np.ndarray, " content"]
    rotation: Rotation | None
    scale: float
    soft_cap: float | None
    bias: Float[np.ndarray, " offset"] | None
    """What is added to the logits at each offset; None for nothing, at any offset."""

    @property
    def reach(self) -> int | None:
        """How many offsets can be had; None for any number."""
        return None if self.bias is None else len(self.bias)

    def logits(
        self,
        query: Int[np.ndarray, " draw"],
        key: Int[np.ndarray, "draw offset"],
    ) -> Float[np.ndarray, "draw offset"]:
        """Of each query with the key drawn for each offset 0, 1, ..."""
        turned = self._turned(query, key.shape[1])
        products = torch.einsum("qod,qod->qo", turned, self.k[torch.from_numpy(key)])
        return self._finished(products.numpy())

    def moments(
        self, query: Int[np.ndarray, " query"], key: Int[np.ndarray, " content"], length: int
    ) -> tuple[Float[np.ndarray, "query offset"], Float[np.ndarray, "query offset"]]:
        """Mean and variance over keys of the logits of each query, at offsets 0 .. length − 1.

        At offset 0 a query meets the key of its own position, so there is no variance.
        """
        mean, variance = np.empty((2, len(query), length))
        keys = self.k[torch.from_numpy(key)]
        held = len(key) if self.soft_cap is not None else keys.shape[1]
        step = max(1, _FLOATS // (held * length))
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            turned = self._turned(query[part], length)
            mean[part], variance[part] = self._over_keys(turned, keys)
        mean[:, 0] = self.logits(query, query[:, None])[:, 0]
        variance[:, 0] = 0.0
        return mean, variance

    def _over_keys(
        self, turned: Float[Tensor, "query offset d_head"], keys: Float[Tensor, "content d_head"]
    ) -> tuple[Float[np.ndarray, "query offset"], Float[np.ndarray, "query offset"]]:
        """Mean and variance of the logits over the keys.

        Without a cap these are ``⟨q, mean k⟩`` and ``⟨q, cov(k) q⟩``: no logit need be made.
        """
        if self.soft_cap is not None:
            logits = self._finished(torch.einsum("qod,kd->qko", turned, keys).numpy())
            return logits.mean(axis=1), logits.var(axis=1)
        centre = keys.mean(dim=0)
        spread = self.scale * (keys - centre) / len(keys) ** 0.5
        variance = (turned @ (spread.T @ spread) * turned).sum(dim=-1)
        return self._finished((turned @ centre).numpy()), variance.numpy()

    def _turned(self, query: Int[np.ndarray, " query"], length: int) -> Tensor:
        """The queries turned by each offset, which is to turn the keys back by it."""
        q = self.q[torch.from_numpy(query)][:, None, None]
        if self.rotation is None:
            return q[:, :, 0].expand(-1, length, -1)
        q = q.expand(-1, length, -1, -1)
        return self.rotation.apply(q, torch.arange(length))[:, :, 0]

    def _finished(self, products: np.ndarray) -> np.ndarray:
        logits = self.scale * products
        if self.soft_cap is not None:
            logits = self.soft_cap * np.tanh(logits / self.soft_cap)
        return logits if self.bias is None else logits + self.bias[: logits.shape[-1]]


def contents_of(
    host: Host, reading: LayerReading, tokens: Int[Tensor, "batch pos"]
) -> Contents | None:
    """The contents of the one head read; None where its q and k know absolute positions.

    Args:
        host: the model's adapter.
        reading: of one head, on the tokens.
        tokens: what was read.
    """
    outside = reading.rotation is not None or host.positions in ("alibi", "t5", "none")
    if reading.q is None or reading.k is None or not outside:
        return None
    q, k = (x[:, :, 0].double().cpu() for x in (reading.q, reading.k))
    geometry = reading.geometry
    bias = _bias(reading, q, k) if geometry.biased else None
    if geometry.rotation is not None:  # at position 0 nothing turns, but YaRN scales
        first = torch.zeros(k.shape[1], dtype=torch.int64)
        k = geometry.rotation.apply(k[:, :, None], first)[:, :, 0]
    return Contents(
        q=rearrange(q, "batch pos d -> (batch pos) d"),
        k=rearrange(k, "batch pos d -> (batch pos) d"),
        tokens=tokens.cpu().numpy().reshape(-1),
        rotation=geometry.rotation,
        scale=geometry.scale,
        soft_cap=geometry.soft_cap,
        bias=bias,
    )


def _bias(reading: LayerReading, q: Tensor, k: Tensor) -> np.ndarray:
    """What the logits have beyond the product, by offset: the same for all contents."""
    product = reading.scale * q[0] @ k[0].T
    extra = (reading.logits[0, 0].double().cpu() - product).numpy()
    last = len(extra) - 1
    bias: np.ndarray = extra[last, last - np.arange(len(extra))]
    return bias
