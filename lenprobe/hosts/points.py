"""Hook points that do more than pass on what they see: a position bias, linear attention.

They stand in a HookedTransformer where its own hook points stood, under the same names, so that
whatever hooks are added later see the biased logits and the linear pattern.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint


class ScorePoint(HookPoint):
    """A score hook that can add a position bias, and keep the logits for a linear pattern."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bias: nn.Module | None = None
        """From logits to biased logits; acts before any hook sees them."""
        self.keep = False
        self.last: Tensor | None = None
        """Where ``keep``: the logits as all hooks left them."""

    def forward(
        self, x: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query key"]:
        """The logits with the bias."""
        return x if self.bias is None else self.bias(x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; the hooks have run when the logits are kept."""
        seen = super().__call__(*args, **kwargs)
        if self.keep:
            self.last = seen
        return seen


class LinearPattern(HookPoint):
    """A pattern hook whose pattern is the raw masked logits: attention without a softmax."""

    def __init__(self, scores: ScorePoint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scores = (scores,)  # in a tuple, so that it is no submodule of this one

    def forward(
        self, x: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query key"]:
        """The logits of the forward at work, 0 where masked."""
        (point,) = self._scores
        scores, point.last = point.last, None
        assert scores is not None  # the attention calls its score hook first
        return scores.masked_fill(scores.isinf(), 0.0)


def score_point(attn: Any) -> ScorePoint:
    """The attention's score hook, exchanged for a :class:`ScorePoint` where it was none yet."""
    if not isinstance(attn.hook_attn_scores, ScorePoint):
        attn.hook_attn_scores = ScorePoint()
    point: ScorePoint = attn.hook_attn_scores
    return point


def make_linear(model: Any) -> None:
    """Exchanges the softmax of every layer for the raw masked logits."""
    for block in model.blocks:
        point = score_point(block.attn)
        point.keep = True
        block.attn.hook_pattern = LinearPattern(point)
    model.setup()
