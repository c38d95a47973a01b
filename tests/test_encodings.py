"""Encodings: what models do with them, and features against plain formulas."""

import math

import numpy as np
import pytest
import torch

from lenprobe import build, encodings
from lenprobe.encodings.alibi import slopes
from lenprobe.encodings.base import FeatureSettings
from lenprobe.encodings.sinusoidal import sinusoids
from lenprobe.encodings.t5 import bucket_of
from lenprobe.reading import read

TOKENS = torch.randint(0, 16, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.bridge
def test_an_unknown_encoding_is_named():
    with pytest.raises(ValueError, match=r"encoding='roap' is unknown; take one of rope, learned"):
        encodings.get("roap")


@pytest.mark.parametrize("name", encodings.NAMES)
def test_every_encoding_builds_reads_and_is_causal(name):
    model = build(name, n_layers=2, n_heads=2)
    assert read(model, TOKENS, 1).self_check <= 1e-6
    changed = TOKENS.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 16
    torch.testing.assert_close(model(TOKENS)[:, :20], model(changed)[:, :20], atol=0, rtol=0)


def order_matters(name):
    """Whether exchanging two tokens of the prefix changes the last query's answer."""
    model = build(name, dtype=torch.float64, init_range=0.5)
    swapped = TOKENS.clone()
    swapped[:, [2, 5]] = swapped[:, [5, 2]]
    return (model(TOKENS)[:, -1] - model(swapped)[:, -1]).abs().max().item()


def test_all_but_none_know_the_order():
    found = {name: order_matters(name) for name in encodings.NAMES}
    assert found.pop("none") < 1e-12
    assert min(found.values()) > 1e-3, found


def test_t5_adds_its_table_where_later_hooks_see_it():
    model = build("t5", n_heads=2)
    with torch.no_grad():
        for name in ("W_Q", "b_Q"):
            getattr(model.blocks[0].attn, name).zero_()
    table = model.blocks[0].attn.hook_attn_scores.bias.weight
    logits = read(model, TOKENS, 0).logits
    for i, j in [(0, 0), (9, 2), (39, 1), (39, 23)]:
        expected = table[bucket_of(np.array([i - j]))[0]]
        torch.testing.assert_close(logits[1, :, i, j], expected.detach())
    assert any(parameter is table for parameter in model.parameters())
    assert table.std() > 0


def test_buckets_are_those_of_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    offset = np.arange(300)
    theirs = T5Attention._relative_position_bucket(
        torch.from_numpy(-offset), bidirectional=False, num_buckets=32, max_distance=128
    )
    np.testing.assert_array_equal(bucket_of(offset), theirs.numpy())


@pytest.mark.parametrize("n_heads", [1, 2, 4, 6])
def test_alibi_penalises_distance_with_the_slopes_of_the_model(n_heads):
    model = build("alibi", n_heads=n_heads, d_model=24)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    logits = read(model, TOKENS, 0).logits[0]
    for i, j in [(5, 5), (39, 0), (20, 13)]:
        np.testing.assert_allclose(logits[:, i, j], -slopes(n_heads) * (i - j), rtol=1e-6)


def test_sinusoids_against_plain_python():
    table = sinusoids(3, 4, 6)
    for p in range(3, 7):
        for m in range(3):
            angle = p / 10000 ** (2 * m / 6)
            assert table[p - 3, 2 * m] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[p - 3, 2 * m + 1] == pytest.approx(math.cos(angle), abs=1e-12)
    model = build("sinusoidal")
    torch.testing.assert_close(model.W_pos.double(), torch.from_numpy(sinusoids(0, 256, 32)))
    assert not model.pos_embed.W_pos.requires_grad
    rows = encodings.get("sinusoidal").position_rows(model, 10**4, 2)
    np.testing.assert_allclose(rows, sinusoids(10**4, 2, 32), atol=1e-6)


def test_the_features_span_the_kernels_of_the_models():
    """A RoPE head with fixed q and k has a kernel in the span of its features."""
    settings = FeatureSettings(train_length=16, n_rows=40, d_head=8)
    (waves,) = encodings.get("rope").features(settings)
    query, key = np.tril_indices(40)
    phi = waves.features(query, key)
    omega = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    expected = np.concatenate(
        [np.cos(np.outer(query - key, omega)), np.sin(np.outer(query - key, omega))], axis=1
    )
    np.testing.assert_allclose(phi, expected, atol=1e-12)
    model = build("rope", d_head=8, dtype=torch.float64)
    with torch.no_grad():
        for name in ("W_Q", "W_K"):
            getattr(model.blocks[0].attn, name).zero_()
        for name in ("b_Q", "b_K"):
            getattr(model.blocks[0].attn, name).normal_(
                generator=torch.Generator().manual_seed(ord(name[-1]))
            )
    logits = read(model, TOKENS, 0).logits[0, 0].numpy()[query, key]
    residual = logits - phi @ np.linalg.lstsq(phi, logits, rcond=None)[0]
    assert np.abs(residual).max() < 1e-10


def test_learned_tables_have_the_models_scale_and_a_scale_of_their_own():
    settings = FeatureSettings(train_length=16, n_rows=64, untrained_scale=2.0, draws=3)
    tables = [each.rows for each in encodings.get("learned").features(settings)]
    assert len(tables) == 3 and not np.allclose(tables[0], tables[1])
    assert np.std(tables[0][:16]) == pytest.approx(0.8 / 32**0.5, rel=0.1)
    assert np.std(tables[0][16:]) == pytest.approx(1.6 / 32**0.5, rel=0.1)
    assert build("learned").W_pos.std().item() == pytest.approx(0.8 / 32**0.5, rel=0.05)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"rotary_dim=7: even, in 2\.\.d_head=32"):
        FeatureSettings(train_length=4, n_rows=8, rotary_dim=7, draws=1, scale=None, head=0)
