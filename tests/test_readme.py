"""What the README shows runs, and its commands and figures are those of the project."""

import re
from pathlib import Path

import pytest

from lenprobe import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]


@pytest.mark.parametrize("code", [c for c in PYTHON if "smollm2" not in c])
def test_its_python_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    said = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    assert all(line in out for line in said)
    assert said or ("peak at offset 3" in out and "float64" in out)


@pytest.mark.weights
@pytest.mark.parametrize("code", [c for c in PYTHON if "smollm2" in c])
def test_its_pretrained_head_is_read(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "carrier (closed form)" in capsys.readouterr().out


def test_its_commands_exist():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in SHELL:
        words = line.split()
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "lenprobe":
            assert cli.main([words[1], "--help"]) == 0, line
        else:
            assert line == "pip install -c constraints.txt -e .", line


def test_its_table_is_what_the_demo_prints(shared_demo):
    """Up to what another processor's rounding changes in a training run."""
    (table,) = (code for language, code in BLOCKS if language == "text")
    printed = shared_demo.summary().splitlines()
    for line in table.splitlines()[1:]:
        name = re.split(r"\s{2,}", line)[0]
        (found,) = (row[len(name) :].split() for row in printed if row.startswith(name))
        shown = line[len(name) :].split()
        for a, b in zip(shown, found, strict=True):
            if re.fullmatch(r"[\d.e+-]+", a):
                exact = 0.1 if name.startswith(("accuracy", "phase")) else 5
                limit = {"equivariance": float(a) * 9, "rank": 3}.get(name.split()[0], exact)
                assert abs(float(a) - float(b)) <= limit, line
            else:
                assert a == b, line
