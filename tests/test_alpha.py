"""α_L: rows known from the theory, one answer whatever the start, user's own parts, real heads."""

import numpy as np
import pytest
from conftest import trained

from lenprobe import AbsoluteSlot, FixedOffset, HalfCopy, Reversal, SourceMap, Strided
from lenprobe.convex import grid, minimise
from lenprobe.encodings.classes import CLASSES, encoding_class
from lenprobe.planted import carrier, pin, random_head
from lenprobe.probes.alpha import Alpha, alpha, alpha_of


@pytest.mark.parametrize("encoding", ["rope", "t5", "table"])
def test_relative_encodings_carry_a_fixed_offset_alone(encoding):
    for d in (1, 3, 8):
        found = alpha(FixedOffset(d), encoding)
        assert found.value >= 0.99 and found.realizable
    assert alpha(Strided(), encoding).value >= 0.99
    for task in (HalfCopy(), Reversal()):
        assert alpha(task, encoding).value <= 0.1


def test_absolute_encodings():
    assert alpha(AbsoluteSlot(2), "sinusoidal").value >= 0.95
    for task in (FixedOffset(3), HalfCopy(), Reversal()):
        found = alpha(task, "learned")
        assert found.value <= 0.1 and len(found.shares) >= 8
    assert alpha(FixedOffset(3), "learned_offset").value >= 0.99  # every row trained


def test_a_learned_slot_depends_on_the_scale_of_untrained_rows():
    values = [alpha(AbsoluteSlot(2), "learned", untrained_scale=s).value for s in (0.5, 1.0, 4.0)]
    assert values[0] >= 0.95 and values[0] >= values[1] >= values[2] and values[2] < 0.9


@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_encodings_with_nothing_to_fit(encoding):
    for task in (FixedOffset(1), AbsoluteSlot(0), HalfCopy()):
        assert alpha(task, encoding).value == 0.0
    assert alpha(AbsoluteSlot(0), "alibi_free").value == 1.0  # a slope that no model has


MOVES = {("sinusoidal", "offset 3"): 0.13, ("learned_offset", "slot 2"): 0.11}
"""Where α moves by more than 0.01 with a λ ten times smaller: partly carried rules, as measured."""


@pytest.mark.parametrize("encoding", CLASSES)
@pytest.mark.parametrize(
    "task", [FixedOffset(3), AbsoluteSlot(2), HalfCopy()], ids=lambda t: t.name
)
def test_one_answer_whatever_the_start_and_the_penalty(encoding, task):
    value = alpha(task, encoding).value
    moved = abs(alpha(task, encoding, penalty=1e-4).value - value)
    assert moved == pytest.approx(MOVES.get((encoding, task.name), 0.0), abs=0.01)
    (first, *_) = encoding_class(encoding, train_length=16, longest=64)
    short = grid(task, range(task.min_length, 17))
    design = first.features(*short.pairs())
    start = np.random.default_rng(0).normal(size=design.shape[1])
    if first.nonnegative:
        start = np.abs(start)
    one, two = (
        minimise(design, short, 1e-3, nonnegative=first.nonnegative, start=s) for s in (None, start)
    )
    np.testing.assert_allclose(first.kernel(one.theta, 20), first.kernel(two.theta, 20), atol=1e-6)


def test_the_fit_is_the_minimum():
    """Against finite differences of the plain objective."""
    task = FixedOffset(2)
    short = grid(task, range(3, 9))
    query, key = short.pairs()
    (waves,) = encoding_class("rope", train_length=8, longest=8, d_head=6)
    phi = waves.features(query, key)
    theta = minimise(phi, short, 1e-2).theta

    def objective(at):
        total = 0.0
        for i in range(2, 8):
            rows = waves.features(np.full(i + 1, i), np.arange(i + 1)) @ at
            total += np.log(np.exp(rows).sum()) - rows[i - 2]
        return total / 6 + 0.005 * at @ at

    base = objective(theta)
    for direction in np.random.default_rng(0).normal(size=(20, len(theta))):
        assert objective(theta + 1e-3 * direction) > base
        slope = (objective(theta + 1e-6 * direction) - objective(theta - 1e-6 * direction)) / 2e-6
        assert abs(slope) < 1e-6


def test_a_users_own_encoding_and_rule():
    task = SourceMap("two back on threes", lambda i, n: np.where(i % 3 == 2, i - 2, -1), shortest=3)
    assert alpha(task, lambda i, j: np.eye(3)[np.minimum(i - j, 2)]).value == 0.0  # 2 and more tie
    assert alpha(task, lambda i, j: np.eye(4)[np.minimum(i - j, 3)]).value == 1.0
    assert alpha(task, "rope").value >= 0.99


def test_real_heads():
    for head, task in ((carrier(3), "offset 3"), (pin(5), "slot 5")):
        found = alpha_of(head.model, 0, 0, lengths=[32, 64])
        assert found.task == task and found.value == 1.0 and found.random_head.max() <= 0.3
    lobed = alpha_of(trained("rope", n_ctx=256), 0, 0, lengths=[64, 200])
    assert lobed.alpha[0] == 1.0 > lobed.alpha[1]  # past the horizon a side lobe wins
    nulls = [
        alpha_of(random_head(seed=s).model, 0, 0, task=FixedOffset(3), lengths=[48]).value
        for s in range(20)
    ]
    assert np.mean(nulls) < 0.2


def test_the_result_is_kept_and_drawn(tmp_path):
    found = alpha(AbsoluteSlot(2), "learned", draws=3)
    again = Alpha.load(found.save(tmp_path / "a.safetensors"))
    np.testing.assert_array_equal(again.shares, found.shares)
    assert len(found.to_frame()) == 9 and "over 3 tables" in str(found)
    assert found.plot().get_ylabel().startswith("α")
    assert found.provenance.settings["penalty"] == 1e-3 and found.spread.shape == (3,)


BAD = {
    "encoding": ({"encoding": "roap"}, r"encoding='roap' is unknown; take one of rope"),
    "short": ({"lengths": [16]}, r"lengths holds N=16, not beyond train_length=16"),
    "none": ({"lengths": []}, r"lengths is empty"),
    "far": ({"task": FixedOffset(20)}, r"has no query at lengths .* train_length ≥ 21"),
    "penalty": ({"penalty": 0.0}, r"penalty=0\.0 must be a finite λ > 0"),
    "fit": ({"fit_lengths": [20]}, r"fit_lengths=\[20\] must lie in 1\.\.train_length=16"),
    "features": ({"encoding": lambda i, j: i - j}, r"return an array \[pair, feature\]"),
    "scale": ({"encoding": "learned", "scale": -1.0}, r"scale=-1\.0: above 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        alpha(**{"task": FixedOffset(3), "encoding": "rope", **change})


def test_unknown_training_lengths_are_asked_for():
    from lenprobe import build

    with pytest.raises(ValueError, match="does not say on which length it was trained; give"):
        alpha_of(build("rope"), 0, 0)
