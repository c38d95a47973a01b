"""The claims of the two papers, each measured: one module a group of claims.

``heads`` trains one-head models and asks C1 to C5 and C13 of them, ``linear`` C6, ``deep`` C7,
``theory`` C8 to C12 of a grid of trained models and of α_L.
"""

from lenprobe.claims.base import Claim as Claim
from lenprobe.claims.base import Effort as Effort
