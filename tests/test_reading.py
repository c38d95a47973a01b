"""The reading layer: logits are those the softmax received, on every host, without a trace."""

import copy
import math

import numpy as np
import pytest
import tiny_models as tiny
import torch

from lenprobe.hosts import cast, host_of, untouched
from lenprobe.reading import UnverifiedReading, read, read_shifted, stream

pytestmark = pytest.mark.bridge

ROTARY = [
    "llama",
    "llama-llama3",
    "llama-linear",
    "llama-yarn",
    "neox",
    "gemma2",
    "gemma3",
    "qwen3",
    "phi",
]
BOUNDED = ["gpt2", "opt", "bert"]


def models():
    return [*tiny.ARCHITECTURES, "native-rotary", "native-standard"]


def model_named(name):
    return tiny.native(name.split("-")[1]) if name.startswith("native") else tiny.bridge(name)


# --- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_softmax_of_the_logits_is_what_hugging_face_attends_with(name):
    """Against a copy of the model in its own forward, with no hook of TransformerLens."""
    tokens = tiny.tokens()
    with torch.no_grad():
        expected = tiny.huggingface(name)(tokens, output_attentions=True).attentions
    found = stream(tiny.bridge(name), tokens, lambda reading: torch.softmax(reading.logits, -1))
    assert len(found) == len(expected)
    for layer, pattern in found.items():
        torch.testing.assert_close(pattern, expected[layer], atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", models())
def test_q_k_and_the_rotation_make_the_logits(name):
    """Plain NumPy; ALiBi models differ by one bias for all contents."""
    model = model_named(name)
    for layer in range(host_of(model).n_layers):
        reading, other = (read(model, tiny.tokens(3, 12, seed), layer) for seed in (0, 1))
        seen = reading.visible.numpy()
        for b, h in [(0, 0), (2, reading.q.shape[2] - 1)]:
            difference = (reference(reading, b, h) - reading.logits[b, h].numpy())[seen]
            if reading.geometry.biased:
                difference -= (reference(other, b, h) - other.logits[b, h].numpy())[seen]
            assert np.abs(difference).max() < 5e-5 * (1 + np.abs(reference(reading, b, h)).max())


def reference(reading, b, h):
    """All logits of one head on one sequence, one by one."""
    q, k = reading.q[b, :, h].numpy(), reading.k[b, :, h].numpy()
    n = len(q)
    return np.array(
        [[score_reference(reading, q[i], k[j], j - i) for j in range(n)] for i in range(n)]
    )


def score_reference(reading, q, k, distance):
    """One logit, pair by pair; distance = j − i."""
    rotation = reading.rotation
    dims = np.arange(len(q))
    total = 0.0
    turned = set()
    if rotation is not None:
        for a, b, w in zip(
            dims[rotation.real], dims[rotation.imag], rotation.frequencies, strict=True
        ):
            turned |= {a, b}
            c = (q[a] - 1j * q[b]) * (k[a] + 1j * k[b]) * np.exp(1j * w * distance)
            total += rotation.magnitude**2 * c.real
    total += sum(q[x] * k[x] for x in range(len(q)) if x not in turned)
    total *= reading.scale
    return reading.soft_cap * math.tanh(total / reading.soft_cap) if reading.soft_cap else total


def test_masked_pairs_are_minus_infinity_and_windows_are_seen():
    reading = read(tiny.bridge("gemma2"), tiny.tokens(), 0)
    assert torch.isinf(reading.logits[:, :, ~reading.visible]).all()
    assert torch.isfinite(reading.logits[:, :, reading.visible]).all()
    assert reading.visible.sum(-1).max() == 8  # the sliding window
    assert read(tiny.bridge("bert"), tiny.tokens(), 0).visible.all()


def test_layers_without_positions_do_not_rotate():
    model = tiny.bridge("smollm3")
    assert read(model, tiny.tokens(), 0).rotation is not None
    assert read(model, tiny.tokens(), 1).rotation is None


def test_each_layer_has_its_own_base():
    frequencies = stream(tiny.bridge("gemma3"), tiny.tokens(), lambda r: r.rotation.frequencies)
    assert frequencies[0][-1] != frequencies[5][-1]
    np.testing.assert_array_equal(frequencies[0], frequencies[1])


def test_heads_can_be_chosen_and_keep_their_order():
    model, tokens = tiny.bridge("llama"), tiny.tokens()
    every, some = read(model, tokens, 1), read(model, tokens, 1, [3, 0])
    assert some.heads == (3, 0)
    torch.testing.assert_close(some.logits, every.logits[:, [3, 0]])
    torch.testing.assert_close(some.k, every.k[:, :, [3, 0]])


def test_stream_keeps_layer_order_and_reads_only_the_layers_asked():
    model = tiny.bridge("llama")
    assert list(stream(model, tiny.tokens(), lambda r: r.layer, layers=[1, 0])) == [0, 1]
    assert stream(model, tiny.tokens(), lambda r: r.layer, layers=[-1]) == {1: 1}


def test_bfloat16_models_are_read():
    model = tiny.bridge("llama").to(torch.bfloat16)
    assert read(model, tiny.tokens(), 0).self_check < 2e-2


# --- shifted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ROTARY, "native-rotary"])
def test_rotary_models_shift_exactly(name):
    model = model_named(name)
    host, tokens = host_of(model), tiny.tokens()
    with untouched(model), cast(model, torch.float64):
        first, far = (read_shifted(host, tokens, 1, 1, s).logits for s in (0, 10**5))
    seen = torch.isfinite(first)
    assert (first - far)[seen].abs().max() < 1e-12 * (1 + first[seen].abs().max())


@pytest.mark.parametrize("name", [*BOUNDED, "gpt2", "native-standard"])
def test_absolute_models_shift_to_the_rows_of_their_table(name):
    model = model_named(name)
    host, tokens = host_of(model), tiny.tokens()
    first, shifted = (read_shifted(host, tokens, 0, 0, s).logits for s in (0, 50))
    assert (first - shifted)[torch.isfinite(first)].abs().max() > 1e-2
    with pytest.raises(ValueError, match=r"shift=1000 .* table of 128; take shifts in 0\.\.104"):
        read_shifted(host, tokens, 0, 0, 1000)


def test_shifting_a_bridge_is_hugging_faces_position_ids():
    tokens = tiny.tokens()
    plain = tiny.huggingface("gpt2")
    with torch.no_grad():
        expected = plain(
            tokens, position_ids=torch.arange(50, 74)[None], output_attentions=True
        ).attentions[1][:, 0]
    found = read_shifted(host_of(tiny.bridge("gpt2")), tokens, 1, 0, 50)
    torch.testing.assert_close(torch.softmax(found.logits[:, 0], -1), expected, atol=2e-6, rtol=0)


# --- verified ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "bert", "native-rotary", "native-standard"])
def test_a_score_hook_that_carries_the_pattern_is_not_believed(name):
    """The premise, and the reading: rows of logits do not sum to one."""
    model, kept = model_named(name), {}
    attn = model.blocks[0].attn
    handle = attn.hook_attn_scores.register_forward_hook(
        lambda module, args, out: kept.update(scores=out)
    )
    try:
        reading = read(model, tiny.tokens(), 0)
    finally:
        handle.remove()
    torch.testing.assert_close(kept["scores"].sum(-1), torch.ones(kept["scores"].shape[:-1]))
    seen = reading.logits.masked_fill(~reading.visible, 0.0)
    assert (seen.sum(-1) - 1).abs().max() > 1e-2
    assert reading.self_check < 1e-6


@pytest.mark.parametrize("edited", ["hook_attn_scores", "hook_pattern"])
def test_a_model_that_edits_after_the_reading_raises(edited):
    model = tiny.bridge("llama")
    attn = model.blocks[1].attn
    late = []

    def edit_late(module, args, kwargs):
        """Registered at run time, so that it runs after every hook there is."""
        point = getattr(attn, edited)
        late.append(point.register_forward_hook(lambda m, a, out: out * 0.5))

    handle = attn.register_forward_pre_hook(edit_late, with_kwargs=True)
    try:
        if edited == "hook_pattern":  # the last reader of the pattern is the model itself
            point = attn.hook_pattern.register_forward_hook(lambda m, a, out: out * 0.5)
            late.append(point)
        with pytest.raises(UnverifiedReading, match=r"LlamaForCausalLM .* layer 1: the softmax"):
            read(model, tiny.tokens(), 1)
    finally:
        for hook in [handle, *late]:
            hook.remove()
    assert read(model, tiny.tokens(), 1).self_check < 1e-4


def test_edits_made_before_the_softmax_are_part_of_the_head():
    """A user's own hook that was there first changes the logits, and the reading shows that."""
    model, tokens = tiny.bridge("gpt2"), tiny.tokens()
    before = read(model, tokens, 0).logits
    bias = torch.linspace(0, 1, 24)
    handle = model.blocks[0].attn.q.hook_out.register_forward_hook(lambda m, a, out: out * 2)
    try:
        after = read(model, tokens, 0).logits
    finally:
        handle.remove()
    seen = torch.isfinite(before)
    torch.testing.assert_close(after[seen], 2 * before[seen], atol=1e-5, rtol=1e-5)
    assert bias.shape == (24,)


def test_rotary_tables_of_an_unknown_rule_raise():
    model = tiny.bridge("llama")
    handle = model.rotary_emb.register_forward_hook(
        lambda module, args, out: tuple(t.roll(3, dims=1) for t in out)
    )
    try:
        with pytest.raises(ValueError, match=r"LlamaForCausalLM layer 0: the rotary tables"):
            read(model, tiny.tokens(), 0)
    finally:
        handle.remove()


# --- without a trace -----------------------------------------------------------------------------


def trace(model):
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "buffers": {n: (id(b), b.clone()) for n, b in model.named_buffers()},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "training": [m.training for m in model.modules()],
        "random": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }


def assert_same(a, b):
    assert a["hooks"] == b["hooks"] and a["training"] == b["training"] and a["grad"] == b["grad"]
    assert torch.equal(a["random"], b["random"])
    for key, value in a["weights"].items():
        assert torch.equal(value, b["weights"][key]), key
    assert a["buffers"].keys() == b["buffers"].keys()
    for key, (identity, value) in a["buffers"].items():
        assert identity == b["buffers"][key][0] and torch.equal(value, b["buffers"][key][1]), key


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "gpt2", "bert", "native-rotary"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(name, fails):
    model = model_named(name).train()
    model.blocks[0].eval()
    before = trace(model)

    def reduce(reading):
        if fails:
            raise KeyboardInterrupt
        return reading.self_check

    long = tiny.tokens(1, 128)
    try:
        stream(model, long, reduce)
    except KeyboardInterrupt:
        assert fails
    with untouched(model), cast(model, torch.float64):
        read_shifted(host_of(model), tiny.tokens(1, 8), 0, 0, 4)
    assert_same(before, trace(model))


def test_gradients_are_off_in_the_hooks_only():
    model = tiny.bridge("llama")
    reading = read(model, tiny.tokens(), 0)
    assert not reading.logits.requires_grad and torch.is_grad_enabled()
    assert model(tiny.tokens()).requires_grad


# --- bad input -----------------------------------------------------------------------------------

GOOD = {"tokens": tiny.tokens(), "layer": 0, "heads": [0]}
BAD = {
    "layer too large": ({"layer": 2}, ValueError, r"layer=2 is out of range.* has 0\.\.1"),
    "layer too small": ({"layer": -3}, ValueError, r"layer=-3 is out of range"),
    "layer not a number": ({"layer": "0"}, TypeError, r"layer='0' is a str; pass an integer"),
    "layer a bool": ({"layer": True}, TypeError, r"layer=True is a bool"),
    "head too large": ({"heads": [4]}, ValueError, r"head=4 is out of range.* has 0\.\.3"),
    "tokens a list": ({"tokens": [[1, 2]]}, TypeError, r"tokens is a list; pass an integer"),
    "tokens a string": ({"tokens": "hello"}, TypeError, r"tokens is a str"),
    "tokens of floats": ({"tokens": torch.ones(2, 4)}, TypeError, r"token ids are int64"),
    "tokens of rank 1": ({"tokens": tiny.tokens()[0]}, ValueError, r"add the batch axis"),
    "no tokens": ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, ValueError, r"\[1, 0\]"),
    "no sequences": ({"tokens": torch.zeros(0, 4, dtype=torch.long)}, ValueError, r"\[0, 4\]"),
    "one token": ({"tokens": torch.zeros(1, 1, dtype=torch.long)}, ValueError, r"no key to choose"),
    "tokens too long": ({"tokens": tiny.tokens(1, 129)}, ValueError, r"n_ctx=128"),
    "outside the vocabulary": (
        {"tokens": tiny.tokens(d_vocab=65, length=128)},
        ValueError,
        r"ids 0\.\.64, outside the vocabulary 0\.\.63",
    ),
    "negative ids": ({"tokens": tiny.tokens() - 1}, ValueError, r"outside the vocabulary"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, unchecked):
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        read(tiny.bridge("llama"), **{**GOOD, **change})


def test_shapes_are_checked_at_run_time_in_the_tests():
    """Without the fixture ``unchecked`` a wrong rank does not even reach the function."""
    with pytest.raises(Exception, match="tokens"):
        read(tiny.bridge("llama"), tiny.tokens()[0], 0)


def test_compiled_models_are_refused():
    model = tiny.native("rotary")
    with pytest.raises(TypeError, match="_orig_mod"):
        read(torch.compile(model), tiny.tokens(), 0)
    inside = copy.deepcopy(tiny.huggingface("llama"))
    inside.compile()
    with pytest.raises(TypeError, match="compiled"):
        host_of(inside)


def test_other_objects_are_refused_with_the_way_in():
    with pytest.raises(TypeError, match="TransformerBridge and Hugging Face models"):
        read(torch.nn.Linear(2, 2), tiny.tokens(), 0)


def test_a_hugging_face_model_is_read_through_a_bridge_made_once():
    model = tiny.huggingface("llama")
    host = host_of(model)
    assert host_of(model).model is host.model
    direct, bridged = (read(m, tiny.tokens(), 0) for m in (model, tiny.bridge("llama")))
    torch.testing.assert_close(direct.logits, bridged.logits, rtol=0, atol=0)


def test_what_no_bridge_exists_for_is_named():
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    with pytest.raises(TypeError, match=r"T5EncoderModel, which TransformerLens .* cannot bridge"):
        host_of(T5EncoderModel(T5Config(vocab_size=16, **sizes)))
