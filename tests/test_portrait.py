"""Everything about one head, as a library call and as a command."""

import json

import pytest
import tiny_models as tiny
from conftest import trained

from lenprobe import cli, portrait_of, save
from lenprobe.planted import carrier
from lenprobe.pretrained import open_model

PROBES = ("rule", "carrier", "decomposition", "routing", "equivariance", "dilution")


def test_probes_agree_on_a_planted_head():
    found = portrait_of(carrier(3).model, 0, 0).results
    assert tuple(found) == (*PROBES, "pinning", "alpha")
    assert found["rule"].number == found["carrier"].peak == found["dilution"].target == 3
    assert found["routing"].kind == "position" and not found["pinning"].found
    assert found["decomposition"].relative_share == pytest.approx(1.0)
    assert found["alpha"].value == 1.0


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mpt"])
def test_every_host(name):
    found = portrait_of(tiny.bridge(name), 0, 1, tiny.tokens(8, 24))
    assert tuple(found.results) == PROBES and set(found.left_out) == {"pinning", "alpha"}
    assert "not asked: the training length is not known" in found.summary()


def test_the_command(tmp_path, capsys):
    folder = save(trained("learned", n_ctx=64), tmp_path / "m")
    assert cli.main(["probe", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rule"]["kind"] == "offset" and found["rule"]["number"] == 3
    assert found["alpha"]["task"] == "offset 3" and found["pinning"]["train_length"] == 16
    assert "pinned to slot" in found["pinning"]["summary"]
    assert cli.main(["probe", str(folder), "--head", "1"]) == 2
    assert "head=1" in capsys.readouterr().err
    assert cli.main(["probe", str(tmp_path / "nowhere")]) == 2
    assert "is no folder here; give a folder that lenprobe.save wrote" in capsys.readouterr().err


def test_saved_models_are_opened(tmp_path):
    model = carrier(2).model
    assert open_model(str(save(model, tmp_path / "m"))).lenprobe.train_length == 16
