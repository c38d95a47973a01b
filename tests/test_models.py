"""Models: configured, built, saved and loaded."""

import copy
import json

import numpy as np
import pytest
import torch

from lenprobe import build, config, encodings, load, save
from lenprobe.models import is_saved, spec_of
from lenprobe.reading import read
from lenprobe.weights import set_weights, weights_of

TOKENS = torch.randint(0, 16, (2, 24), generator=torch.Generator().manual_seed(0))


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002


def hooked():
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["rope", "learned", "learned_offset"])
def test_both_majors_build_it_from_a_seed_alone(name):
    build(name)  # imports the host; type checks at run time draw from Python's own generator
    before = torch.get_rng_state(), numpy_state()
    one, same, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy_state() == before[1]
    assert torch.equal(one(TOKENS), same(TOKENS)) and not torch.equal(one(TOKENS), other(TOKENS))
    assert spec_of(one).encoding == name and spec_of(one).train_length is None


@pytest.mark.bridge
def test_a_configuration_says_what_was_asked():
    cfg = config("rope", n_heads=2, d_model=48, rotary_base=500.0, rotary_dim=8, n_ctx=99)
    assert (cfg.d_head, cfg.rotary_base, cfg.rotary_dim, cfg.n_ctx) == (24, 500, 8, 99)
    assert cfg.rotary_adjacent_pairs and cfg.attn_only and cfg.normalization_type is None


@pytest.mark.bridge
def test_base_and_rotary_dim_are_what_turns():
    reading = read(build("rope", rotary_base=500.0, rotary_dim=8), TOKENS, 0)
    assert reading.rotation.frequencies.tolist() == pytest.approx(
        [500 ** (-m / 4) for m in range(4)]
    )
    assert reading.rotation.adjacent and reading.rotation.pairs == 4


@pytest.mark.bridge
def test_a_layer_norm_and_mlps():
    model = build(
        "rope", n_layers=2, n_heads=2, attn_only=False, normalization_type="LN", act_fn="relu"
    )
    names = weights_of(model).keys()
    assert {"blocks.1.mlp.W_in", "blocks.0.ln2.w", "ln_final.b"} <= names
    assert read(model, TOKENS, 1).self_check <= 1e-6


@pytest.mark.skipif(hooked(), reason="only where HookedTransformer is gone")
@pytest.mark.bridge
@pytest.mark.parametrize("name", ["sinusoidal", "alibi", "t5", "none"])
def test_4x_names_the_install_that_has_the_others(name):
    with pytest.raises(ValueError, match=r'pip install "transformer-lens>=3\.9,<4"'):
        build(name)


@pytest.mark.skipif(hooked(), reason="only where HookedTransformer is gone")
@pytest.mark.bridge
def test_4x_refuses_what_a_native_bridge_cannot_do():
    with pytest.raises(ValueError, match=r'attention=.linear. .* pip install "transformer-lens'):
        build("rope", attention="linear")
    with pytest.raises(ValueError, match=r"rotary_base=500\.5"):
        build("rope", rotary_base=500.5)


def test_linear_attention_takes_the_raw_logits_as_the_pattern():
    model = build("t5", attention="linear", n_layers=2)
    reading = read(model, TOKENS, 1)
    seen = reading.logits.masked_fill(~reading.visible, 0.0)
    assert torch.equal(reading.pattern, seen) and (reading.pattern < 0).any()
    edited = model.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda s, hook: s * 2)]
    )
    assert not torch.allclose(edited, model(TOKENS))  # edits of the logits reach the pattern
    cache = model.run_with_cache(TOKENS)[1]
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"], reading.pattern)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", encodings.NAMES)
def test_copies_and_functional_calls_keep_what_was_installed(name, attention):
    model = build(name, attention=attention)
    twin = copy.deepcopy(model)
    expected = model(TOKENS)
    assert torch.equal(twin(TOKENS), expected)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert torch.equal(torch.func.functional_call(model, state, (TOKENS,)), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(TOKENS), expected)


# --- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", encodings.NAMES)
def test_what_is_saved_comes_back_to_the_bit(name, attention, tmp_path):
    model = build(name, attention=attention, n_layers=2, n_heads=2, dtype=torch.float64, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    folder = save(model, tmp_path / "m")
    again = load(folder)
    assert torch.equal(again(TOKENS), model(TOKENS)) and spec_of(again) == spec_of(model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["rope", "learned"])
def test_saving_over_a_saved_model_replaces_it(name, tmp_path):
    save(build(name, seed=0), tmp_path / "m")
    model = build(name, seed=1)
    save(model, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m")(TOKENS), model(TOKENS)) and is_saved(tmp_path / "m")


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["rope", "learned"])
def test_a_native_bridge_holds_the_same_weights(name):
    """The layout that a model saved under the other major version is loaded through."""
    import tiny_models as tiny

    positions = "rotary" if name == "rope" else "standard"
    bridge = tiny.native(positions, d_vocab=16, n_ctx=256)
    model = build(name, n_layers=2, n_heads=2)
    weights = {k: v for k, v in weights_of(model).items()}
    set_weights(bridge, weights)
    torch.testing.assert_close(bridge(TOKENS), model(TOKENS), atol=2e-6, rtol=0)
    back = weights_of(bridge)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[k], weights[k]) for k in weights)


@pytest.mark.bridge
def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other things; name a new or an empty folder"):
        save(build("rope"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.bridge
def test_bad_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors and no config\.json"):
        load(tmp_path / "nowhere")
    folder = save(build("rope"), tmp_path / "m")
    config_file = folder / "config.json"
    good = config_file.read_text()
    config_file.write_text('{"hidden_size": 4}')
    with pytest.raises(ValueError, match="is no configuration of lenprobe"):
        load(folder)
    fields = json.loads(good)
    fields["arguments"]["d_model"] = 16
    config_file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"do not fit the model: .*W_Q is \[1, 32, 32\]"):
        load(folder)


@pytest.mark.bridge
def test_only_models_of_lenprobe_are_saved(tmp_path):
    with pytest.raises(ValueError, match=r"a Linear that lenprobe\.build did not make"):
        save(torch.nn.Linear(2, 2), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.bridge
def test_weights_that_do_not_fit_change_nothing():
    model = build("rope")
    before = model(TOKENS)
    weights = weights_of(model)
    weights["extra"] = weights.pop("embed.W_E")
    with pytest.raises(ValueError, match=r"embed\.W_E is missing; extra has no place"):
        set_weights(model, weights)
    assert torch.equal(model(TOKENS), before)


BAD = {
    "encoding": ({"encoding": "rotary"}, r"encoding='rotary' is unknown"),
    "size": ({"n_layers": 0}, r"n_layers=0: a whole number, 1 or more"),
    "several": ({"n_ctx": -1, "d_vocab": 1.5}, r"d_vocab=1\.5: .*; n_ctx=-1"),
    "heads": ({"n_heads": 5}, r"d_model=32 does not divide into n_heads=5"),
    "odd": ({"rotary_dim": 5}, r"rotary_dim=5: an even number in 2\.\.d_head=32"),
    "base": ({"rotary_base": 1.0}, r"rotary_base=1\.0: above 1"),
    "norm": ({"normalization_type": "BN"}, r"normalization_type='BN': one of"),
    "dtype": ({"dtype": torch.int8}, r"dtype=torch\.int8: torch\.float32"),
    "attention": ({"attention": "hard"}, r"attention='hard' is unknown; take 'softmax'"),
    "not rotary": ({"encoding": "learned", "rotary_dim": 8}, r"rotary_dim=8 with encoding='rope'"),
}


@pytest.mark.bridge
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, unchecked):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        build(**{"encoding": "rope", **change})
