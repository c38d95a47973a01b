"""T5's relative positions: a learned bias for each bucket of offsets (Raffel et al. 2020).

Half of the buckets hold one offset each, the others ranges that grow with the logarithm up to
``MAX_DISTANCE``, from where all offsets share the last.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lenprobe.encodings.base import Encoding, FeatureSettings
from lenprobe.encodings.features import FeatureMap, OffsetFeatures

BUCKETS, MAX_DISTANCE = 32, 128


def bucket_of(offset: Int[np.ndarray, " offset"]) -> Int[np.ndarray, " offset"]:
    """The bucket of each offset Δ ≥ 0, as T5's causal attention numbers them.

    >>> bucket_of(np.array([0, 15, 16, 127, 10**6])).tolist()
    [0, 15, 16, 31, 31]
    """
    exact = BUCKETS // 2
    ratio = np.log(np.maximum(offset, 1) / exact) / np.log(MAX_DISTANCE / exact)
    large = np.minimum(exact + (ratio * (BUCKETS - exact)).astype(np.int64), BUCKETS - 1)
    return np.where(offset < exact, offset, large)


class BucketBias(nn.Module):
    """The table, and the bias that it adds to a layer's logits."""

    def __init__(self, n_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(BUCKETS, n_heads, dtype=dtype))
        buckets = torch.from_numpy(bucket_of(np.arange(MAX_DISTANCE + 1)))
        self.bucket: Tensor
        self.register_buffer("bucket", buckets, persistent=False)

    def forward(
        self, scores: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query key"]:
        """The logits with each pair's bias; the last query is at the last key."""
        query, key = scores.shape[-2:]
        index = torch.arange(key, device=scores.device)
        offset = (index[key - query :, None] - index).clamp(0, MAX_DISTANCE)
        return scores + self.weight[self.bucket[offset]].permute(2, 0, 1)


class BucketedBias(Encoding):
    """The host has no such kind for decoders: a model with no positions and a bias a layer."""

    name = "t5"

    def configure(self, **_: Any) -> dict[str, Any]:
        """A rotation of no dimensions."""
        return {"positional_embedding_type": "rotary", "rotary_dim": 0}

    def install(self, model: Any) -> None:
        """A table a layer, drawn as the host draws its matrices."""
        from lenprobe.hosts.points import score_point

        generator = torch.Generator().manual_seed(model.cfg.seed or 0)
        for block in model.blocks:
            bias = BucketBias(model.cfg.n_heads, model.cfg.dtype).to(model.cfg.device)
            drawn = torch.randn(bias.weight.shape, generator=generator)
            with torch.no_grad():
                bias.weight.copy_(drawn * model.cfg.initializer_range)
            score_point(block.attn).bias = bias
        model.setup()

    def features(self, settings: FeatureSettings) -> list[FeatureMap]:
        """One-hot of the offset's bucket."""
        return [OffsetFeatures(name=self.name, function=lambda d: np.eye(BUCKETS)[bucket_of(d)])]


T5 = BucketedBias()
