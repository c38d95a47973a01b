"""The claims: judged right on made-up figures, and the whole study run small."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lenprobe.alpha_table import alpha_table
from lenprobe.claims.base import FULL, QUICK, Claim, Effort, span
from lenprobe.claims.deep import ablation_drops
from lenprobe.claims.linear import min_norm, norm_ratio
from lenprobe.claims.theory import (
    Theory,
    above_floor,
    auc,
    ceiling,
    loosening,
    ranking,
    runs_of,
    separation,
    spearman,
)
from lenprobe.cli import main, strict_json
from lenprobe.grid import GRIDS, Grid
from lenprobe.planted import carrier
from lenprobe.probes.carrier import carrier_of
from lenprobe.study import study
from lenprobe.tasks import FixedOffset

GRID = Grid(
    tasks=("offset:3", "slot:2", "reversal"),
    encodings=("rope", "sinusoidal"),
    architectures=("1L1H", "2L4H"),
    seeds=3,
    steps=250,
    sequences=32,
)
SMALL = Effort(offsets=(3,), seeds=1, steps=700, layers=(2,), deep_seeds=1, grid=GRID)


def naive_auc(score, positive):
    pairs = [(a, b) for a in score[positive] for b in score[~positive]]
    return np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs])


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed):
    draw = np.random.default_rng(seed)
    score, positive = draw.integers(0, 5, 20) / 4, draw.random(20) < 0.4
    assert auc(score, positive) == pytest.approx(naive_auc(score, positive))


def test_auc_needs_both():
    assert np.isnan(auc(np.array([1.0, 0.0]), np.array([True, True])))


@pytest.fixture(scope="module")
def alphas():
    return alpha_table(GRID.tasks, GRID.encodings, 16, GRID.lengths, progress=False)


def frame_of(quality, content=0.1):
    """Runs whose accuracy is a function of task, encoding, architecture and seed."""
    rows = [
        {
            "task": cell.task,
            "encoding": cell.encoding,
            "architecture": cell.architecture,
            "seed": seed,
            "fit_accuracy": 1.0,
            "length": length,
            "accuracy": quality(cell, seed),
            "rule_share": quality(cell, seed),
            "content_share": content if cell.architecture == "1L1H" else 2 * content,
        }
        for cell in GRID.cells()
        for seed in range(GRID.seeds)
        for length in GRID.lengths
    ]
    return pd.DataFrame(rows)


def theory(alphas, quality, **kwargs):
    return Theory(
        grid=GRID,
        alphas=alphas,
        runs=runs_of(frame_of(quality, **kwargs), alphas),
        scales={1.0: 1.0},
        content=pd.DataFrame(),
    )


def alpha_of_pair(alphas, cell):
    name = {"offset:3": "offset 3", "slot:2": "slot 2", "reversal": "reversal"}[cell.task]
    return alphas.value[alphas.tasks.index(name), alphas.encodings.index(cell.encoding)]


def test_models_that_do_what_alpha_says_make_the_claims_hold(alphas):
    found = theory(alphas, lambda cell, seed: alpha_of_pair(alphas, cell))
    assert separation(found).holds and found.auc("accuracy") == 1.0
    assert ranking(found).holds and found.rho("1L1H")[1] == pytest.approx(1.0)
    assert loosening(found).holds is False  # the tie is as close with more heads


def test_models_that_do_the_contrary_make_them_fail(alphas):
    found = theory(alphas, lambda cell, seed: 1 - alpha_of_pair(alphas, cell))
    assert separation(found).holds is False and found.auc("accuracy") == 0.0
    assert ranking(found).holds is False
    assert "not below: offset:3 × rope (α 1.00, accuracy 0.00" in separation(found).figure


def test_content_routing_loosens_the_tie(alphas):
    def quality(cell, seed):
        return 0.9 if cell.architecture != "1L1H" else alpha_of_pair(alphas, cell)

    with pytest.warns(match="constant"):  # all deeper runs are equal: no rank to correlate
        found = theory(alphas, quality).rho("2L4H")
    assert np.isnan(found[0])

    def uneven(cell, seed):
        better = 0.9 + 0.01 * (3 * seed + len(cell.task)) / 20
        return better if cell.architecture != "1L1H" else alpha_of_pair(alphas, cell)

    claim = loosening(theory(alphas, uneven))
    assert claim.holds and "9 of 9 runs" in claim.figure
    assert loosening(theory(alphas, uneven, content=-0.1)).holds is False

    def low(cell, seed):
        return alpha_of_pair(alphas, cell) if cell.architecture == "1L1H" else seed / 10

    claim = loosening(theory(alphas, low))  # no deep run that content could have helped
    assert claim.holds is None and "no run of this grid" in claim.figure


def test_accuracy_counts_above_chance(alphas):
    runs = runs_of(frame_of(lambda cell, seed: 0.0625), alphas)
    assert (runs["above_chance"] == 0).all() and len(runs) == GRID.models
    runs.loc[0, "rule_share"] = np.nan  # a run that diverged
    runs["rule_share"] *= runs["alpha"] + 0.1
    assert spearman(runs, "rule_share") == pytest.approx(1.0)


def test_quality_counts_from_what_models_without_positions_reach():
    rows = [("none", 0.15), ("none", 0.2), ("rope", 0.9), ("learned", 0.1)]
    runs = pd.DataFrame(
        [{"architecture": "1L1H", "task": "t", "encoding": e, "accuracy": a} for e, a in rows]
    )
    np.testing.assert_allclose(above_floor(runs, "accuracy")["accuracy"], [0, 0, 0.7, 0])


@pytest.mark.parametrize("seed", range(3))
def test_no_untied_quality_ranks_better_than_the_ceiling(seed):
    from scipy import stats

    draw = np.random.default_rng(seed)
    values = draw.integers(0, 4, 30).astype(float)
    best = values + 1e-9 * draw.random(30)  # in the right order, without ties
    assert stats.spearmanr(values, best).statistic == pytest.approx(ceiling(values), abs=1e-9)
    assert ceiling(values) < 1


@pytest.mark.parametrize("residual", [0.02, 0.3, 0.9])
def test_min_norm_is_the_smallest_that_comes_as_close(residual):
    omega = np.linspace(0.2, 3.0, 8)
    theta = min_norm(omega, 3, 16, residual)
    angles = np.outer(np.arange(16), omega)
    features = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    features -= features.mean(axis=0)
    wanted = np.eye(16)[3] - 1 / 16
    assert np.linalg.norm(features @ theta - wanted) == pytest.approx(residual, rel=1e-6)
    draw = np.random.default_rng(0)
    for _ in range(50):  # no other that is as close is shorter
        other = theta + draw.normal(size=len(theta)) * np.linalg.norm(theta) * 0.1
        closest = np.linalg.norm(features @ other - wanted) <= residual
        assert not closest or np.linalg.norm(other) >= np.linalg.norm(theta)
    # at the optimum θ lies along the gradient of the distance
    gradient = features.T @ (wanted - features @ theta)
    cosine = gradient @ theta / np.linalg.norm(gradient) / np.linalg.norm(theta)
    assert cosine == pytest.approx(1.0, abs=1e-6)


def test_no_norm_is_needed_to_come_nowhere_near():
    assert np.linalg.norm(min_norm(np.array([1.0, 0.1]), 1, 8, residual=1.0)) == 0


def test_norm_ratio_is_at_least_one_and_one_for_the_least():
    head = carrier(3)
    found = carrier_of(head.model, head.layer, head.head, target=3)
    assert 1 <= norm_ratio(found) < np.inf
    omega = np.linspace(0.2, 3.0, 8)
    theta = min_norm(omega, 3, 16, 0.5)
    waves = theta[: len(omega)] - 1j * theta[len(omega) :]
    kernel = (waves * np.exp(1j * np.outer(np.arange(16), omega))).real.sum(axis=1)
    own = replace(
        found,
        offsets=np.arange(16),
        kernel=7 * kernel + 2,  # neither scale nor constant counts
        measured=kernel,
        amplitudes=7 * np.abs(waves),
        frequencies=omega,
        phases=np.angle(waves),
        train_length=16,
    )
    assert 1 - 1e-9 <= norm_ratio(own) < 1.1


def test_ablation_finds_the_head_and_puts_it_back(trained_rope):
    drops = ablation_drops(trained_rope, FixedOffset(3), 16, sequences=64)
    assert drops.shape == (1, 1) and drops[0, 0] > 0.8
    assert not trained_rope.blocks[0].attn.hook_z._forward_hooks


def test_efforts():
    assert QUICK.grid is GRIDS["quick"] and FULL.grid is GRIDS["full"]
    assert set(QUICK.offsets) <= set(FULL.offsets) and QUICK.seeds <= FULL.seeds
    assert span([1.0, 1.0]) == "1.000"


@pytest.fixture(scope="module")
def small_study(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study"), effort=SMALL, jobs=1, progress=False)


def test_the_study_judges_every_claim(small_study):
    names = [claim.name for claim in small_study.claims]
    assert names == [f"C{number}" for number in range(1, 14)]
    by_name = {claim.name: claim for claim in small_study.claims}
    for name in ("C1", "C2", "C3", "C11"):
        assert by_name[name].holds, by_name[name].figure
    assert by_name["C12"].holds is None and by_name["C12"].verdict == "reported"
    for claim in small_study.claims:
        assert claim.figure and "nan" not in claim.figure, claim


def test_its_table_and_json(small_study):
    text = small_study.summary()
    assert "C13" in text and f"report: {small_study.report}" in text
    scored = [c for c in small_study.claims if c.holds is not None]
    assert f"{sum(c.holds for c in scored)} of {len(scored)} claims hold" in text
    found = json.loads(strict_json(small_study.as_dict()))
    assert len(found["claims"]) == 13 and found["grid"]["models"] == GRID.models
    assert small_study.to_frame().shape[0] == 13


def test_its_report(small_study):
    page = small_study.report.read_text()
    for title in ("Claims", "Carriers (C4)", "α against trained models (C8, C9, C10)"):
        assert title in page
    for claim in small_study.claims:
        assert claim.verdict in page
    assert page.count("data:image/svg+xml") >= 8 and "http://" not in page.replace(
        "http://www.w3.org", ""
    )


def test_a_second_study_trains_no_grid_again(small_study, monkeypatch):
    from lenprobe.sweep import sweep

    again = sweep(GRID, small_study.sweep.folder, progress=False)
    assert again.trained == 0
    with pytest.raises(ValueError, match="a sweep of another grid"):
        sweep(replace(GRID, seeds=4), small_study.sweep.folder, progress=False)


def test_verdicts():
    claim = Claim(name="C0", text="t", figure="f", threshold="h", holds=False)
    assert claim.verdict == "does not hold" and claim.as_dict()["verdict"] == "does not hold"


def test_bad_input(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["study", "--out", str(tmp_path / "file"), "--quick"]) == 2
    assert "file" in capsys.readouterr().err
