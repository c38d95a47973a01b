"""From the attention's mass on tokens to the model's answer.

In a model of one attention head and nothing else, the output is affine in the mass that the last
query puts on each token: ``logits = mass · W_E W_V W_O W_U + W_E[query's token] W_U + constant``.
Other models have no such formula; there the token with the largest mass stands for the answer.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from lenprobe.hosts import Host
from lenprobe.models import spec_of
from lenprobe.weights import weights_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Readout:
    """The answer given attention and tokens."""

    d_vocab: int
    copied: Float[np.ndarray, "token d_vocab"] | None = None
    """What one unit of mass on a token adds to the output; None where mass itself is the answer."""
    direct: Float[np.ndarray, "token d_vocab"] | None = None
    """What the query's own token adds, constant included."""

    def answers(
        self, pattern: Float[np.ndarray, "draw offset"], tokens: Int[np.ndarray, "draw offset"]
    ) -> Int[np.ndarray, " draw"]:
        """The most likely token of each sequence; column 0 is the query's own position.

        >>> both = np.array([[0.4, 0.3, 0.3]]), np.array([[1, 2, 2]])
        >>> Readout(d_vocab=3).answers(*both).tolist()
        [2]
        """
        if self.d_vocab > 4096:  # a large vocabulary: sequences hold few of its tokens
            return np.array([_heaviest(p, t) for p, t in zip(pattern, tokens, strict=True)])
        draws = len(tokens)
        cell = np.arange(draws)[:, None] * self.d_vocab + tokens
        mass = np.bincount(cell.ravel(), pattern.ravel(), draws * self.d_vocab)
        mass = mass.reshape(draws, self.d_vocab)
        if self.copied is not None and self.direct is not None:
            mass = mass @ self.copied + self.direct[tokens[:, 0]]
        return mass.argmax(axis=1)


def readout_of(host: Host) -> Readout:
    """The read-out of a model: its own where it has one head alone, else the mass."""
    spec = spec_of(host.model)
    alone = host.n_layers == 1 and host.n_heads == 1 and bool(host.cfg.attn_only)
    positions_added = spec is None or spec.encoding in ("learned", "learned_offset", "sinusoidal")
    if not alone or positions_added or host.cfg.normalization_type is not None:
        return Readout(d_vocab=host.d_vocab)
    w = {name: tensor.double().cpu().numpy() for name, tensor in weights_of(host.model).items()}
    attn = {name.rsplit(".", 1)[1]: value for name, value in w.items() if ".attn." in name}
    embed, unembed = w["embed.W_E"], w["unembed.W_U"]
    through = attn["W_O"][0] @ unembed
    constant = attn["b_V"][0] @ through + attn["b_O"] @ unembed + w["unembed.b_U"]
    return Readout(
        d_vocab=host.d_vocab,
        copied=embed @ attn["W_V"][0] @ through,
        direct=embed @ unembed + constant,
    )


def _heaviest(pattern: np.ndarray, tokens: np.ndarray) -> int:
    names, place = np.unique(tokens, return_inverse=True)
    return int(names[np.bincount(place, pattern).argmax()])
