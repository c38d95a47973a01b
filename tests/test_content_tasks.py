"""Tasks whose answers depend on the content: right answers, trainable, and out of α's scope."""

import numpy as np
import pytest
import torch

from lenprobe import Addition, Induction, Sort, accuracy_by_length, alpha, build, fit, fit_many
from lenprobe.alpha_table import alpha_table, named_task
from lenprobe.grid import Grid
from lenprobe.tasks import IGNORE

ALL = (Induction(), Sort(), Addition())


def sequences(task, length, batch=50):
    return task.sample(batch, length, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [3, 8, 17])
def test_induction_names_what_followed(length):
    for row, answers in zip(
        (tokens := sequences(Induction(4), length)).tolist(),
        Induction(4).targets(tokens).tolist(),
        strict=True,
    ):
        for i, answer in enumerate(answers):
            before = [j for j in range(i) if row[j] == row[i]]
            assert answer == (row[before[-1] + 1] if before else IGNORE)


@pytest.mark.parametrize("length", [2, 7, 16])
def test_sort_names_the_first_half_in_order(length):
    tokens = sequences(Sort(), length)
    half = (length + 1) // 2
    answers = Sort().targets(tokens)
    assert (answers[:, :half] == IGNORE).all()
    expected = [sorted(row[:half])[: length - half] for row in tokens.tolist()]
    assert answers[:, half:].tolist() == expected


@pytest.mark.parametrize("length", [3, 9, 17])
def test_addition_is_that_of_numbers(length):
    tokens, m = sequences(Addition(10), length), length // 3
    answers = Addition(10).targets(tokens)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        a, b, total = (
            int("".join(map(str, digits)))
            for digits in (row[:m], row[m : 2 * m], answer[2 * m : 3 * m])
        )
        assert total == (a + b) % 10**m
    assert (answers[:, : 2 * m] == IGNORE).all() and (answers[:, 3 * m :] == IGNORE).all()


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_models_train_on_them(task):
    alone, together = build("rope"), [build("rope", seed=seed) for seed in range(2)]
    course = fit(alone, task, [9, 12], steps=30, progress=False)
    stacked = fit_many(together, task, [9, 12], steps=30, progress=False)
    np.testing.assert_allclose(course.loss, stacked[0].loss, atol=1e-4)
    found = accuracy_by_length(alone, task, [12, 24], sequences=64, train_length=12)
    assert 0 <= found.at(24) <= 1 and np.isnan(found.new[0])


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_alpha_does_not_score_them(task, unchecked):
    assert not task.in_scope
    with pytest.raises(ValueError, match=r"no source map.*content, which α_L does not cover"):
        alpha(task, "rope")


def test_the_table_marks_them():
    table = alpha_table(["offset:1", "sort"], ["rope"], lengths=[32], progress=False)
    assert table.value[0, 0] == 1.0 and np.isnan(table.value[1, 0])
    assert "out of scope, content decides: sort" in table.summary()
    assert named_task("addition") == Addition()


def test_the_grid_has_no_place_for_them():
    with pytest.raises(ValueError, match="task='induction' has no source map"):
        Grid(tasks=("induction",))


def test_too_few_tokens():
    for kind in (Induction, Sort, Addition):
        with pytest.raises(ValueError, match="d_vocab=1 is out of range; take 2 or more"):
            kind(1)
    with pytest.raises(ValueError, match="lengths holds 2, at which task 'addition' has no query"):
        fit(build("rope"), Addition(), [2], progress=False)
