"""What is installed: every folder, a light import, the public names, typed and without a double."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lenprobe

ROOT = Path(__file__).parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("transformer_lens", "torch", "transformers", "matplotlib", "pandas", "scipy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.bridge
def test_import_is_light():
    code = f"import lenprobe, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.bridge
def test_probes_are_one_package():
    code = "import lenprobe, sys; lenprobe.carrier_of; print('probes' in sys.modules)"
    assert run(code) == "False"
    assert (ROOT / "lenprobe" / "probes").is_symlink()
    assert (ROOT / "lenprobe" / "probes").readlink() == Path("../probes")


def test_every_package_is_listed():
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "lenprobe").rglob("__init__.py")
    } | {"lenprobe.probes"}
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == on_disk


@pytest.mark.bridge
def test_every_public_name_is_there_and_known_to_type_checkers():
    tree = ast.parse((ROOT / "lenprobe" / "__init__.py").read_text())
    typed = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lenprobe")
        for alias in node.names
        if alias.asname
    }
    assert typed == lenprobe._HOME
    for name in lenprobe.__all__:
        assert callable(getattr(lenprobe, name)), name
    assert lenprobe.__version__ == CONFIG["project"]["version"]
    with pytest.raises(AttributeError, match="has no attribute 'carier_of'"):
        _ = lenprobe.carier_of


def test_only_hosts_and_models_import_transformer_lens():
    allowed = {"models.py", "pretrained.py"}
    for path in (*(ROOT / "lenprobe").glob("*.py"), *(ROOT / "probes").glob("*.py")):
        names = {
            module for node in ast.walk(ast.parse(path.read_text())) for module in _imported(node)
        }
        if path.name not in allowed:
            assert not any(name.split(".")[0] == "transformer_lens" for name in names), path


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_what_is_imported_is_declared():
    declared = {
        name.split(">")[0].split("[")[0].replace("-", "_")
        for name in CONFIG["project"]["dependencies"]
    } | {"markupsafe"}  # jinja2's own
    extras = {"distributed", "dask"}
    for path in (*(ROOT / "lenprobe").rglob("*.py"), *(ROOT / "probes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for module in _imported(node):
                top = module.split(".")[0]
                known = top in sys.stdlib_module_names or top in declared | extras
                assert known or top == "lenprobe", (path, module)


@pytest.mark.bridge
def test_the_command_is_installed_as_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "lenprobe", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == CONFIG["project"]["version"]


def test_a_wheel_holds_the_probes_once(tmp_path):
    import zipfile

    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("-w", str(tmp_path), str(_copy(tmp_path / "src"))),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert "lenprobe/probes/carrier.py" in names and "lenprobe/py.typed" in names
    assert "lenprobe/report/report.html" in names
    assert not any(name.startswith(("probes/", "tests/")) for name in names)


def _copy(target: Path) -> Path:
    """The sources alone, so that no build folder is left in the checkout."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("lenprobe", "probes"):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return target
