"""The notebooks run from top to bottom, and what is committed is what their scripts say."""

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest
from test_pretrained import weights

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def runnable(script):
    """With a mark that skips it where it needs weights that are not there."""
    marks = weights if "smollm2" in script.read_text() else []
    return pytest.param(script, marks=marks, id=script.stem)


@pytest.mark.parametrize("script", [runnable(script) for script in SCRIPTS])
def test_it_runs(script):
    notebook = jupytext.read(script)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}
    )
    client.execute()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_committed_notebook_is_the_script_with_outputs(script):
    committed = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in committed.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    for cell in committed.cells:
        outputs = cell.get("outputs", [])
        assert cell.cell_type != "code" or cell.execution_count
        assert not any(output.output_type == "error" for output in outputs)
        assert not any(output.get("name") == "stderr" for output in outputs)
    assert any(cell.get("outputs") for cell in committed.cells)
