"""The command line and the main job: one JSON object, one page, errors in one line."""

import json
import math
import re

import pytest

from lenprobe import cli
from lenprobe.demo import demo


def test_json_alone_on_standard_output(tmp_path, capsys):
    arguments = ["demo", "--steps", "120", "--train-length", "8", "--json", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1 and "training offset 3" in err
    for name in ("rope", "learned"):
        assert list(found[name]["accuracy"]) == ["8", "12", "16", "24", "32", "64"]
        assert set(found[name]["equivariance"]) == {"float64", "float32", "bfloat16", "float16"}
        carrier = found[name]["carrier"]
        assert {"peak", "alignment", "margin", "horizon", "rank_99"} <= set(carrier)
    assert found["learned"]["carrier"]["alignment"] is None
    assert found["report"] == str(tmp_path / "report.html") and found["seconds"] > 0
    assert found["versions"]["torch"]
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.split("<script")[0])


def test_the_main_job_shows_the_claims(shared_demo):
    rope, learned = shared_demo.heads["rope"], shared_demo.heads["learned"]
    assert rope.accuracy.at(16) >= 0.999 and rope.accuracy.at(48) >= 0.95
    assert abs(learned.accuracy.at(48) - 1 / 16) <= 0.06
    assert (
        rope.equivariance.errors["float64"]
        <= 1e-10
        < 0.1
        <= min(learned.equivariance.errors.values())
    )
    assert rope.carrier.peak == 3 and rope.carrier.alignment >= 0.6
    assert rope.carrier.correlation >= 0.999 and rope.carrier.rank_99 <= 33
    assert 16 <= rope.carrier.horizon < math.inf
    assert shared_demo.report.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--offset", "16"], "offset=16 does not fit in sequences of train_length=16"),
        (["demo", "--train-length", "3"], "train_length=3 is out of range; take 4 to 128"),
        (["demo", "--steps", "0"], "steps=0 trains nothing"),
        (["demo", "--offset", "x"], "Invalid value for '--offset'"),
        (["alpha", "--tasks", "sorting"], "task='sorting' is unknown; take offset:D"),
        (["alpha", "--encodings", "roap"], "encodings are rope, learned"),
        (["alpha", "--lengths", "8"], "lengths holds N=8, not beyond train_length=16"),
        (["alpha", "--lengths", "x"], "lengths holds 'x'; give whole numbers"),
        (["bench", "--repeats", "0"], "repeats=0 times nothing"),
        (["fetch", "gpt5"], "name='gpt5' cannot be fetched; take smollm2, minilm or iglm"),
        (["dance"], "No such command 'dance'"),
    ],
)
def test_an_error_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lenprobe: ") and err.count("\n") == 1
    assert message in err and not list(tmp_path.iterdir())


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        demo(out=tmp_path / "out")


def test_no_arguments_show_the_help(capsys):
    assert cli.main([]) == 0
    assert "demo" in "".join(capsys.readouterr())


def test_the_alpha_table(tmp_path, capsys):
    arguments = ["alpha", "--tasks", "offset:3,half-copy", "--encodings", "rope t5", "--json"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == ["offset 3", "half copy"] and found["encodings"] == ["rope", "t5"]
    assert found["alpha"][0] == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert max(max(row) for row in found["alpha"][1]) <= 0.1
    assert "<img" in (tmp_path / "alpha.html").read_text()


def test_every_cell_of_the_alpha_table(capsys):
    """The rows of the theory, at the defaults (Han, Chai, Wang)."""
    assert cli.main(["alpha"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[2].split()
    rows = {line[:9].strip(): dict(zip(head, line[9:].split(), strict=True)) for line in lines[3:]}
    for encoding in ("rope", "t5", "table"):
        assert all(float(rows[f"offset {d}"][encoding]) >= 0.99 for d in (1, 3, 8))
        assert float(rows["half copy"][encoding]) <= 0.1 >= float(rows["reversal"][encoding])
    assert float(rows["slot 2"]["sinusoidal"]) >= 0.95


def test_the_bench_prints_ratios(capsys):
    assert cli.main(["bench", "--repeats", "1", "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert len(pairs) == 6
    for pair in pairs:
        assert pair["ratio"] == pytest.approx(pair["seconds"] / pair["peer_seconds"])
        assert pair["holds"] == (pair["ratio"] <= pair["at_most"])
