"""The package as a whole: what an import does, and which way imports point."""

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import pure_backend

ROOT = pathlib.Path(pure_backend.__file__).parent

DESIGN = ROOT.parent / "docs" / "design.md"


def rooms() -> dict[str, list[str]]:
    """The table of rooms in docs/design.md: what each imports."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", DESIGN.read_text().split("## Rooms")[1].split("\n## ")[0], re.MULTILINE)
    return {room: re.findall(r"`(\w+)`", imports) for room, imports in rows}


def files_of(room: str) -> list[pathlib.Path]:
    """The files of a room: one module, or all of a package."""
    return [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else sorted((ROOT / room).rglob("*.py"))


def imported_parts(path: pathlib.Path) -> set[str]:
    """The parts of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "pure_backend":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pure_backend."):
            found.add(node.module.split(".")[1])
    return found


def test_the_table_has_all_rooms():
    found = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__", "__main__"}
    assert found == set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_imports_are_those_of_the_table(room):
    """Exactly those, and only of rooms above: so no two rooms import each other."""
    found = set().union(*(imported_parts(path) for path in files_of(room))) - {room}
    assert found == set(rooms()[room])
    above = list(rooms())[: list(rooms()).index(room)]
    assert found <= set(above)


def test_only_compat_imports_torchax():
    importers = [p.name for p in ROOT.rglob("*.py") if "import torchax" in p.read_text()]
    assert importers == ["_compat.py"]


@pytest.mark.parametrize("room", ["ir", "fx_passes", "pipeline", "calls", "backend"])
def test_jax_is_known_behind_the_bridge_only(room):
    for path in files_of(room):
        assert not re.search(r"^\s*(import|from) jax\b", path.read_text(), re.MULTILINE), path


GLOBALS = """
import json, os, sys
import torch, jax

def state():
    flags = {name: str(value) for name, value in jax.config.values.items()}
    return [
        flags, dict(os.environ), str(torch.get_default_dtype()), torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(), torch.get_default_device().type, torch.are_deterministic_algorithms_enabled(),
    ]

torch.compile(lambda x: x, backend="eager")(torch.ones(3))  # what Dynamo itself changes
before = state()
import pure_backend
after_import = state()
loaded = sorted(m for m in ("jax_bridge", "torchax", "torch_xla") if m in sys.modules or f"pure_backend.{m}" in sys.modules)
compiled = torch.compile(lambda x: x.sin() + torch.rand(3), backend="assume_pure")
compiled(torch.ones(3))
try:
    torch.compile(lambda x: x.unique(), backend="assume_pure")(torch.ones(3))
except pure_backend.PureBackendError:
    pass
now = state()
changed = [name for a, b in zip(after_import, now) if isinstance(a, dict) for name in {*a, *b} if a.get(name) != b.get(name)]
print(json.dumps([before == after_import, after_import[2:] == now[2:], changed, loaded]))
"""


def test_no_global_changes():
    """Neither importing nor compiling changes a JAX flag, a torch default or an environment variable."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", GLOBALS], capture_output=True, text=True, check=True)
    same_after_import, same_after_compile, changed, loaded = json.loads(run.stdout.strip().splitlines()[-1])
    assert same_after_import and same_after_compile
    assert (changed, loaded) == ([], [])


def test_torchax_environment_still_works():
    """A user's own torchax goes on working beside us (torchax pull request 95: a dead tracer as its key)."""
    torch.compile(lambda x: x + torch.rand_like(x), backend="assume_pure")(torch.zeros(3))
    import torchax

    with torchax.default_env():
        assert torch.rand(2, device="jax").shape == (2,)


def test_options_are_checked():
    with pytest.raises(TypeError, match="valid options are remat, repeats, max_specializations"):
        pure_backend.Options.of({"remt": "none"})
    with pytest.raises(ValueError, match="'remat'"):
        pure_backend.Options(remat="some")
    with pytest.raises(ValueError, match="'repeats'"):
        pure_backend.Options(repeats="always")
    with pytest.raises(ValueError, match="'max_specializations'"):
        pure_backend.Options(max_specializations=0)
