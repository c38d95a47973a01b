"""lenprobe: by what rule does an attention head pick its key, how exactly, and up to what length.

Everything here is loaded when it is first used; ``import lenprobe`` imports no TransformerLens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenprobe.ablation import ablated as ablated
    from lenprobe.content_tasks import Addition as Addition
    from lenprobe.content_tasks import Induction as Induction
    from lenprobe.content_tasks import Sort as Sort
    from lenprobe.models import build as build
    from lenprobe.models import config as config
    from lenprobe.models import load as load
    from lenprobe.models import save as save
    from lenprobe.portrait import portrait_of as portrait_of
    from lenprobe.probes.alpha import alpha as alpha
    from lenprobe.probes.alpha import alpha_of as alpha_of
    from lenprobe.probes.carrier import carrier_of as carrier_of
    from lenprobe.probes.decomposition import decompose as decompose
    from lenprobe.probes.dilution import dilution_of as dilution_of
    from lenprobe.probes.equivariance import equivariance_of as equivariance_of
    from lenprobe.probes.pinning import pinning_of as pinning_of
    from lenprobe.probes.routing import routing_of as routing_of
    from lenprobe.probes.rule import rule_of as rule_of
    from lenprobe.probes.scan import scan as scan
    from lenprobe.stacking import fit_many as fit_many
    from lenprobe.tasks import AbsoluteSlot as AbsoluteSlot
    from lenprobe.tasks import FixedOffset as FixedOffset
    from lenprobe.tasks import HalfCopy as HalfCopy
    from lenprobe.tasks import Reversal as Reversal
    from lenprobe.tasks import SourceMap as SourceMap
    from lenprobe.tasks import Strided as Strided
    from lenprobe.training import accuracy_by_length as accuracy_by_length
    from lenprobe.training import fit as fit
    from lenprobe.views import attention_view as attention_view

_HOME = {
    "build": "lenprobe.models",
    "config": "lenprobe.models",
    "load": "lenprobe.models",
    "save": "lenprobe.models",
    "carrier_of": "lenprobe.probes.carrier",
    "equivariance_of": "lenprobe.probes.equivariance",
    "alpha": "lenprobe.probes.alpha",
    "alpha_of": "lenprobe.probes.alpha",
    "decompose": "lenprobe.probes.decomposition",
    "dilution_of": "lenprobe.probes.dilution",
    "pinning_of": "lenprobe.probes.pinning",
    "portrait_of": "lenprobe.portrait",
    "routing_of": "lenprobe.probes.routing",
    "rule_of": "lenprobe.probes.rule",
    "scan": "lenprobe.probes.scan",
    "ablated": "lenprobe.ablation",
    "Addition": "lenprobe.content_tasks",
    "Induction": "lenprobe.content_tasks",
    "Sort": "lenprobe.content_tasks",
    "AbsoluteSlot": "lenprobe.tasks",
    "FixedOffset": "lenprobe.tasks",
    "HalfCopy": "lenprobe.tasks",
    "Reversal": "lenprobe.tasks",
    "SourceMap": "lenprobe.tasks",
    "Strided": "lenprobe.tasks",
    "accuracy_by_length": "lenprobe.training",
    "fit": "lenprobe.training",
    "fit_many": "lenprobe.stacking",
    "attention_view": "lenprobe.views",
}
"""Where each public name lives."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from lenprobe.results import versions

        return versions()["lenprobe"]
    if name not in _HOME:
        raise AttributeError(f"module 'lenprobe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
