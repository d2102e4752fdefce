"""The package as users and type checkers get it: names, imports, layers, wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import tide

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "tide").rglob("*.py"))

# Which packages each one must not import when it is loaded: imports go only downward.
FORBIDDEN = {
    "compiler": {"kernels", "transport", "fsdp", "report", "cli", "demo"},
    "kernels": {"compiler", "plan", "transport", "fsdp", "report", "cli", "demo"},
    "transport": {"plan", "fsdp", "report", "cli", "demo"},
    "report": {"transport", "fsdp", "cli", "demo"},
}


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, from the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def _names_loaded(path: Path) -> set[str]:
    """Dotted names that a module imports when it is loaded: not those in functions or for type checkers."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), str(path))]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import; write `from tide...`"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("name", ["Plan", "TideError", "Topology", "compile_plan", "load_plan"])
def test_public_name_is_there(name: str) -> None:
    assert name in tide.__all__
    assert getattr(tide, name) is not None


def test_everything_announced_resolves() -> None:
    assert len(set(tide.__all__)) == len(tide.__all__)
    missing = [name for name in tide.__all__ if not hasattr(tide, name)]
    assert missing == []


@pytest.mark.parametrize("module", ["tide", "tide.compiler", "tide.planning"])
def test_import_does_not_load_torch(module: str) -> None:
    heavy = "{'torch', 'triton'}"
    done = _python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"importing {module} loads {done.stdout.strip()}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    part = path.relative_to(ROOT / "tide").parts[0]
    loaded = _names_loaded(path)
    forbidden = {f"tide.{name}" for name in FORBIDDEN.get(part, ())}
    upward = {name for name in loaded if ".".join(name.split(".")[:2]) in forbidden}
    assert not upward, f"{path.relative_to(ROOT)} imports upward: {sorted(upward)}"


def test_installed_metadata() -> None:
    about = metadata.metadata("tide-collectives")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert {"cuda12", "cuda13", "notebook", "dev"} <= set(about.get_all("Provides-Extra") or [])
    assert "tide" in {script.name for script in metadata.entry_points(group="console_scripts")}


def test_wheel_ships_types_and_licence_and_nothing_else(tmp_path: Path) -> None:
    """The wheel holds every module, the marker for type checkers and the licence, and no tests."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--wheel-dir", str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("tide_collectives-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(about).decode("utf-8"))
    assert "tide/py.typed" in names
    assert {str(path.relative_to(ROOT)) for path in SOURCES} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tide"}
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["License-File"] == "LICENSE"
