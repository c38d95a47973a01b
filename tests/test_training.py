"""Training and accuracy by length: what is learned, determinism, bad input."""

import statistics

import numpy as np
import pytest
import torch
from conftest import trained

from lenprobe import AbsoluteSlot, FixedOffset, SourceMap, accuracy_by_length, build, fit
from lenprobe.models import spec_of
from lenprobe.training import LengthAccuracy, correct, cross_entropy


@pytest.mark.parametrize("d", [1, 3, 8])
def test_rope_extrapolates_and_learned_positions_do_not(d):
    """Trained at 16: RoPE answers at 48, learned absolute guesses (arXiv 2607.18759)."""
    task = FixedOffset(d)
    rope = [accuracy_by_length(trained("rope", d, seed), task, [16, 48]) for seed in range(3)]
    assert min(each.at(16) for each in rope) >= 0.999
    assert statistics.median(each.at(48) for each in rope) >= 0.95
    learned = accuracy_by_length(trained("learned", d), task, [16, 48], sequences=4096)
    assert learned.at(16) >= 0.999
    assert abs(learned.at(48) - learned.chance) <= 0.05


@pytest.mark.bridge
def test_the_same_seed_gives_the_same_model():
    losses, states = [], []
    for seed in (0, 0, 1):
        model = build("rope")
        before = torch.get_rng_state()
        history = fit(model, FixedOffset(2), [8, 12], steps=30, seed=seed, progress=False)
        assert torch.equal(torch.get_rng_state(), before)
        losses.append(history.loss)
        states.append(model(torch.arange(12)[None]))
        assert not history.solved and history.steps == 30 and set(history.length) == {8, 12}
    np.testing.assert_array_equal(losses[0], losses[1])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.bridge
def test_it_stops_when_solved_and_notes_what_it_trained_on():
    model = build("rope")
    model.eval()
    history = fit(model, FixedOffset(1), [12], solved=0.05, progress=False)
    assert history.solved and 100 <= history.steps < 2000
    assert history.loss[-100:].mean() < 0.05
    spec = spec_of(model)
    assert spec.train_length == 12 and spec.task == "offset 1" and not model.training
    assert accuracy_by_length(model, FixedOffset(1), [12, 24]).train_length == 12
    assert "stopped early: solved" in str(history) and len(history.to_frame()) == history.steps
    assert history.plot().get_yscale() == "log"


def test_untrained_rows_of_a_learned_table_stay_as_they_were():
    model = build("learned")
    before = model.W_pos.detach().clone()
    fit(model, FixedOffset(1), [16], steps=20, progress=False)
    assert torch.equal(model.W_pos[16:], before[16:])
    assert (model.W_pos[:16] != before[:16]).all()


@pytest.mark.bridge
def test_random_offsets_train_every_row():
    from lenprobe.weights import weights_of

    model = build("learned_offset", n_ctx=40)
    before = weights_of(model)["pos_embed.W_pos"]
    fit(model, FixedOffset(1), [16], steps=20, progress=False)
    after = weights_of(model)["pos_embed.W_pos"]
    assert (after != before).any(dim=1).all()


def test_linear_attention_trains():
    model = build("rope", attention="linear")
    history = fit(model, FixedOffset(3), [16], steps=300, progress=False)
    assert history.loss[-20:].mean() < 0.7 * history.loss[:20].mean()


def test_a_slot_is_learned():
    model = build("learned")
    fit(model, AbsoluteSlot(2), [16], steps=300, progress=False)
    assert accuracy_by_length(model, AbsoluteSlot(2), [16]).all_queries[0] >= 0.99


@pytest.mark.bridge
def test_accuracy_against_plain_loops():
    model, task = build("rope"), FixedOffset(2)
    found = accuracy_by_length(model, task, [5, 9], sequences=70, seed=4, train_length=6)
    tokens = task.sample(70, 9, generator=torch.Generator().manual_seed(4))
    answer = model(tokens).argmax(-1)
    hits = np.array(
        [[bool(answer[b, i] == tokens[b, i - 2]) for i in range(2, 9)] for b in range(70)]
    )
    assert found.last_query[1] == hits[:, -1].mean() and found.all_queries[1] == hits.mean()
    assert found.trained[1] == hits[:, :4].mean() and found.new[1] == hits[:, 4:].mean()
    assert np.isnan(found.new[0]) and found.at(9) == found.last_query[1]
    with pytest.raises(ValueError, match="length=7 was not measured"):
        found.at(7)


@pytest.mark.bridge
def test_large_batches_are_measured_in_parts(monkeypatch):
    model, task = build("rope"), FixedOffset(1)
    tokens = task.sample(9, 8, generator=torch.Generator().manual_seed(0))
    whole = correct(model, task, tokens)
    monkeypatch.setattr("lenprobe.training._FLOATS", 2 * 8 * 8)
    np.testing.assert_array_equal(correct(model, task, tokens), whole)


@pytest.mark.bridge
def test_cross_entropy_counts_only_what_is_asked():
    logits = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    targets = torch.tensor([[-100, 1]])
    expected = np.log(1 + np.exp(2.0))
    assert cross_entropy(logits, targets).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.bridge
def test_the_result_is_kept_and_drawn(tmp_path):
    found = accuracy_by_length(build("rope"), FixedOffset(1), [8, 16], sequences=16, train_length=8)
    again = LengthAccuracy.load(found.save(tmp_path / "a.safetensors"))
    np.testing.assert_array_equal(again.new, found.new)
    assert again.train_length == 8 and "chance 0.062" in str(found)
    assert found.plot().get_xlabel().startswith("sequence length") and len(found.to_frame()) == 2


BAD = {
    "none": ({"lengths": []}, r"lengths is empty"),
    "too short": (
        {"lengths": [3]},
        r"lengths holds 3, at which task 'offset 3' has no query; .* 4",
    ),
    "too long": ({"lengths": [300]}, r"lengths holds 300, .* at most n_ctx=256 tokens"),
    "zero": ({"lengths": [0]}, r"lengths holds 0, at which"),
    "vocabulary": ({"task": FixedOffset(3, d_vocab=20)}, r"d_vocab=20 tokens, the model 16"),
    "rule": ({"task": SourceMap("ahead", lambda i, n: i + 1)}, r"sends query 0 to key 1"),
    "steps": ({"steps": 0}, r"steps=0: 1 or more"),
    "rate": ({"learning_rate": 0.0, "batch": 0}, r"batch=0: 1 or more; learning_rate=0\.0: above"),
    "decay": ({"weight_decay": -1.0}, r"weight_decay=-1\.0: 0 or more"),
}


@pytest.mark.bridge
@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(case):
    change, message = BAD[case]
    model = build("rope")
    before = model(torch.arange(9)[None])
    arguments = {"task": FixedOffset(3), "lengths": [8], "progress": False, **change}
    with pytest.raises(ValueError, match=message):
        fit(model, **arguments)
    assert torch.equal(model(torch.arange(9)[None]), before)
    assert spec_of(model).train_length is None


@pytest.mark.bridge
def test_accuracy_needs_sequences():
    with pytest.raises(ValueError, match="sequences=0 measures nothing"):
        accuracy_by_length(build("rope"), FixedOffset(1), [8], sequences=0)
