"""Both papers' claims with one command: trained, measured, and told apart into holds or not.

What does not hold is printed as such. Nothing is scored against a threshold that was set after
the figure was seen.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lenprobe.claims import Claim, Effort
from lenprobe.claims.base import FULL, QUICK
from lenprobe.claims.deep import DeepModel, train_deep, transfer
from lenprobe.claims.heads import (
    Heads,
    carrier,
    dilution,
    equivariance,
    extrapolation,
    pinning,
    random_offsets,
    train_heads,
)
from lenprobe.claims.linear import Linear, softmax_matters, train_linear
from lenprobe.claims.theory import (
    Theory,
    by_encoding,
    loosening,
    out_of_scope,
    ranking,
    separation,
    theory_of,
)
from lenprobe.results import versions
from lenprobe.sweep import Sweep, sweep
from lenprobe.typing import Json

if TYPE_CHECKING:
    import pandas as pd

REPORT = "study.html"
"""The page, in the study's folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """The claims, and everything that they were judged on."""

    claims: tuple[Claim, ...]
    heads: Heads
    linear: Linear
    deep: tuple[DeepModel, ...]
    theory: Theory
    sweep: Sweep
    report: Path
    seconds: float

    def to_frame(self) -> "pd.DataFrame":
        """One row a claim."""
        import pandas as pd

        return pd.DataFrame([claim.as_dict() for claim in self.claims])

    def summary(self) -> str:
        """The claims table in text."""
        lines = []
        for claim in self.claims:
            lines.append(f"{claim.name.ljust(4)}{claim.verdict.ljust(15)}{claim.text}")
            lines.append(f"{' ' * 19}measured: {claim.figure}")
            lines.append(f"{' ' * 19}holds when: {claim.threshold}")
        scored = [claim.holds for claim in self.claims if claim.holds is not None]
        end = f"{sum(scored)} of {len(scored)} claims hold; took {self.seconds:.0f} s"
        return "\n".join([*lines, "", f"report: {self.report}", end])

    def as_dict(self) -> Json:
        """What ``lenprobe study --json`` prints."""
        return {
            "claims": [claim.as_dict() for claim in self.claims],
            "grid": {"models": self.sweep.grid.models, "fitted": self.sweep.fitted},
            "report": str(self.report),
            "seconds": round(self.seconds, 2),
            "versions": versions(),
        }


def study(
    out: str | Path,
    *,
    quick: bool = False,
    effort: Effort | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Study:
    """Trains and measures what C1 to C13 need, and writes ``out/study.html``.

    The grid of trained models goes to ``out/sweep``; a study that was stopped goes on there.

    Args:
        out: the folder, made if missing.
        quick: a smaller grid and fewer seeds, four to six minutes on two cores; the whole takes
            about an hour.
        effort: how much is trained, in place of ``quick``.
        jobs: processes of the grid; one a core by default.
        progress: shows progress bars on standard error.

    Raises:
        ValueError: the folder holds a grid of another kind.
        lenprobe.sweep.SweepStopped: a worker of the grid died.
    """
    start = time.perf_counter()
    effort = effort or (QUICK if quick else FULL)
    folder = Path(out)
    swept = sweep(effort.grid, folder / "sweep", jobs=jobs, progress=progress)
    heads = train_heads(effort, progress=progress)
    linear = train_linear(effort, progress=progress)
    deep = tuple(train_deep(effort, progress=progress))
    theory = theory_of(swept.frame, effort.grid, progress=progress)
    claims = (
        extrapolation(heads),
        equivariance(heads),
        pinning(heads),
        carrier(heads),
        dilution(heads),
        softmax_matters(linear),
        transfer([*deep]),
        separation(theory),
        ranking(theory),
        loosening(theory),
        by_encoding(theory),
        out_of_scope(theory),
        random_offsets(heads),
    )
    found = Study(
        claims=claims,
        heads=heads,
        linear=linear,
        deep=deep,
        theory=theory,
        sweep=swept,
        report=folder / REPORT,
        seconds=time.perf_counter() - start,
    )
    from lenprobe.report.study import write_study

    write_study(found, found.report)
    return replace(found, seconds=time.perf_counter() - start)
