"""Position encodings: how a model is configured for one, its features φ(i, j), its positions.

One file an encoding. ``get(name)`` returns it, ``NAMES`` lists them; ``features_of`` gives the
kernel classes that α_L fits, those of encodings that no model here has among them.
"""

from lenprobe.encodings.alibi import ALIBI
from lenprobe.encodings.base import Encoding as Encoding
from lenprobe.encodings.learned import LEARNED, LEARNED_OFFSET
from lenprobe.encodings.none import NONE
from lenprobe.encodings.rope import ROPE
from lenprobe.encodings.sinusoidal import SINUSOIDAL
from lenprobe.encodings.t5 import T5

_ALL = {
    encoding.name: encoding
    for encoding in (ROPE, LEARNED, LEARNED_OFFSET, SINUSOIDAL, ALIBI, T5, NONE)
}

NAMES = tuple(_ALL)
"""Every encoding that ``build`` makes a model with."""


def get(name: str) -> Encoding:
    """The encoding of a name.

    >>> get("rope").name
    'rope'

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _ALL:
        raise ValueError(f"encoding={name!r} is unknown; take one of {', '.join(NAMES)}")
    return _ALL[name]
