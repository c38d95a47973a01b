"""Many models trained at once: each as if trained alone, and an ordinary model afterwards."""

import numpy as np
import pytest
import torch

from lenprobe import FixedOffset, accuracy_by_length, build, carrier_of, fit, load, save
from lenprobe.encodings import NAMES
from lenprobe.models import spec_of
from lenprobe.stacking import fit_many, is_stackable
from lenprobe.tasks import HalfCopy
from lenprobe.weights import weights_of

MIXED = range(4, 17)


def pair_of_sets(encoding, count=3, **arguments):
    arguments = {"n_ctx": 48, "d_model": 16} | arguments
    return [[build(encoding, seed=s, **arguments) for s in range(count)] for _ in range(2)]


def largest_difference(alone, together):
    return max(
        float((weights_of(a)[name] - weights_of(b)[name]).abs().max())
        for a, b in zip(alone, together, strict=True)
        for name in weights_of(a)
    )


@pytest.mark.parametrize("task,lengths", [(FixedOffset(3), [16]), (HalfCopy(), MIXED)])
@pytest.mark.parametrize("heads,layers", [(1, 1), (4, 2)])
@pytest.mark.parametrize("encoding", NAMES)
def test_each_model_takes_the_course_it_would_take_alone(encoding, heads, layers, task, lengths):
    shape = {"n_heads": heads, "n_layers": layers, "dtype": torch.float64}
    alone, together = pair_of_sets(encoding, **shape)
    single = [fit(m, task, lengths, 25, seed=s, progress=False) for s, m in enumerate(alone)]
    stacked = fit_many(together, task, lengths, 25, progress=False)
    for a, b in zip(single, stacked, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(a.length, b.length)
    assert largest_difference(alone, together) < 1e-10


@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_in_float32_the_loss_agrees_to_1e_5_until_each_stops_by_itself(encoding):
    alone, together = pair_of_sets(encoding, d_model=32)
    single = [
        fit(m, FixedOffset(3), [16], 1000, seed=s, progress=False) for s, m in enumerate(alone)
    ]
    stacked = fit_many(together, FixedOffset(3), [16], 1000, progress=False)
    assert len({each.steps for each in single}) > 1  # they stop apart
    for a, b in zip(single, stacked, strict=True):
        assert a.steps == b.steps and a.solved == b.solved
        np.testing.assert_allclose(a.loss, b.loss, rtol=0, atol=1e-5)


def test_the_models_are_ordinary_afterwards(tmp_path):
    (models, _) = pair_of_sets("rope", d_model=32)
    fit_many(models, FixedOffset(2), [16], 1000, progress=False)
    for model in models:
        assert spec_of(model).train_length == 16 and spec_of(model).task == "offset 2"
        assert accuracy_by_length(model, FixedOffset(2), [16]).at(16) == 1.0
        assert carrier_of(model, 0, 0).peak == 2
    again = load(save(models[1], tmp_path / "model"))
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again(tokens), models[1](tokens), rtol=0, atol=0)


def test_seeds_decide_the_batches():
    alone, together = pair_of_sets("none", count=2)
    single = [
        fit(m, FixedOffset(1), [8], 5, seed=s, progress=False)
        for s, m in zip((7, 3), alone, strict=True)
    ]
    stacked = fit_many(together, FixedOffset(1), [8], 5, seeds=[7, 3], progress=False)
    for a, b in zip(single, stacked, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, atol=1e-5)


@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"batch": 5}, {"learning_rate": 0.01}])
@pytest.mark.parametrize("encoding", ["sinusoidal", "alibi"])
def test_settings_act_as_they_do_alone(encoding, setting):
    alone, together = pair_of_sets(encoding, dtype=torch.float64)
    for seed, model in enumerate(alone):
        fit(model, FixedOffset(1), [8], 10, seed=seed, progress=False, **setting)
    fit_many(together, FixedOffset(1), [8], 10, progress=False, **setting)
    assert largest_difference(alone, together) < 1e-10


@pytest.mark.parametrize(
    "arguments",
    [{"attn_only": False}, {"normalization_type": "LN"}, {"attention": "linear"}],
    ids=["mlp", "norm", "linear"],
)
def test_other_shapes_are_trained_one_after_another(arguments):
    alone, together = pair_of_sets("rope", count=2, **arguments)
    assert not is_stackable(together[0])
    for seed, model in enumerate(alone):
        fit(model, FixedOffset(1), [8], 5, seed=seed, progress=False)
    fit_many(together, FixedOffset(1), [8], 5, progress=False)
    assert largest_difference(alone, together) == 0


def test_partial_rotation_and_narrow_heads():
    alone, together = pair_of_sets("rope", rotary_dim=4, d_head=10, dtype=torch.float64)
    for seed, model in enumerate(alone):
        fit(model, FixedOffset(1), [8], 10, seed=seed, progress=False)
    fit_many(together, FixedOffset(1), [8], 10, progress=False)
    assert largest_difference(alone, together) < 1e-10


@pytest.mark.bridge
@pytest.mark.parametrize("encoding", ["rope", "learned", "learned_offset"])
def test_on_the_host_that_is_installed(encoding):
    alone, together = pair_of_sets(encoding, count=2)
    single = [fit(m, FixedOffset(1), [8], 20, seed=s, progress=False) for s, m in enumerate(alone)]
    stacked = fit_many(together, FixedOffset(1), [8], 20, progress=False)
    for a, b in zip(single, stacked, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "models,arguments,message",
    [
        ([], {}, "models is empty"),
        (["rope", "learned"], {}, "models are of 2 shapes"),
        (["rope", "rope"], {"seeds": [1]}, "seeds has 1 entries for 2 models"),
        (["rope"], {"steps": 0}, "steps=0: 1 or more"),
        (["rope"], {"lengths": [2]}, "lengths holds 2, at which task 'offset 3' has no query"),
        (["rope"], {"lengths": [300]}, "at most n_ctx=256"),
    ],
)
def test_bad_input(models, arguments, message, unchecked):
    built = [build(name) for name in models]
    before = [weights_of(model) for model in built]
    given = {"lengths": [16], "steps": 5} | arguments
    with pytest.raises(ValueError, match=message):
        fit_many(built, FixedOffset(3), progress=False, **given)
    for model, weights in zip(built, before, strict=True):
        assert all(torch.equal(weights_of(model)[name], weights[name]) for name in weights)
        assert spec_of(model).train_length is None


def test_one_model_is_not_trained_twice():
    model = build("rope")
    with pytest.raises(ValueError, match="holds one model twice"):
        fit_many([model, model], FixedOffset(3), [16], 5, progress=False)
