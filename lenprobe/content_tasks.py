"""Tasks whose right key depends on the content: outside of what α_L covers.

There is no source map τ(i; n), since where the answer stands changes from sequence to sequence, or
since it is no token of the sequence at all. Models train on them like on any other; α_L does not
score them, and says so.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lenprobe.tasks import IGNORE, TokenTask, check_whole


class ContentTask(TokenTask):
    """Answers that depend on the tokens."""

    in_scope = False


@dataclass(frozen=True)
class Induction(ContentTask):
    """The token that followed the last occurrence of this one.

    >>> Induction().targets(torch.tensor([[5, 7, 2, 5]])).tolist()
    [[-100, -100, -100, 7]]
    """

    d_vocab: int = 16

    name = "induction"
    min_length = 3

    def __post_init__(self) -> None:
        check_whole("d_vocab", self.d_vocab, 2)

    def targets(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """What followed; −100 for a token's first occurrence."""
        index = torch.arange(tokens.shape[1], device=tokens.device)
        same = (tokens[:, :, None] == tokens[:, None, :]) & (index[:, None] > index)
        last = torch.where(same, index, -1).amax(dim=2)
        following = tokens.gather(1, last.clamp(min=0) + (last >= 0))
        return following.masked_fill(last < 0, IGNORE)


@dataclass(frozen=True)
class Sort(ContentTask):
    """The second half names the tokens of the first in rising order.

    >>> Sort().targets(torch.tensor([[5, 7, 2, 0, 0, 0]])).tolist()
    [[-100, -100, -100, 2, 5, 7]]
    """

    d_vocab: int = 16

    name = "sort"
    min_length = 2

    def __post_init__(self) -> None:
        check_whole("d_vocab", self.d_vocab, 2)

    def targets(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """The sorted first half on the second; the half of an odd length is rounded up."""
        half = (tokens.shape[1] + 1) // 2
        found = torch.full_like(tokens, IGNORE)
        found[:, half:] = tokens[:, :half].sort(dim=1).values[:, : tokens.shape[1] - half]
        return found


@dataclass(frozen=True)
class Addition(ContentTask):
    """The last third is the sum of the first two, digit by digit, the highest first.

    Tokens are digits in base ``d_vocab``; what carries beyond the highest digit is dropped.

    >>> Addition(10).targets(torch.tensor([[1, 9, 2, 3, 0, 0]])).tolist()
    [[-100, -100, -100, -100, 4, 2]]
    """

    d_vocab: int = 16

    name = "addition"
    min_length = 3

    def __post_init__(self) -> None:
        check_whole("d_vocab", self.d_vocab, 2)

    def targets(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """The digits of the sum on the last third of 3 · (n // 3) positions."""
        digits = tokens.shape[1] // 3
        found = torch.full_like(tokens, IGNORE)
        carry = torch.zeros_like(tokens[:, 0])
        for place in reversed(range(digits)):
            total = tokens[:, place] + tokens[:, digits + place] + carry
            found[:, 2 * digits + place] = total % self.d_vocab
            carry = total // self.d_vocab
        return found
