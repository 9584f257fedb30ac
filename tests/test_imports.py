"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ingot"
MLX = ("mlx", "mlx_lm", "transformers", "torch")

FORBIDDEN = {
    "engine": ("ingot.protocol", "ingot.http", "ingot.cli", "ingot.web"),
    "cache": ("ingot.engine", "ingot.protocol", "ingot.http", "ingot.text", "ingot.cli"),
    "models": ("ingot.engine", "ingot.protocol", "ingot.http", "ingot.cli"),
    "kernels": ("ingot.engine", "ingot.protocol", "ingot.http", "ingot.cli", "ingot.models", "ingot.cache"),
    "text": ("ingot.engine", "ingot.protocol", "ingot.http", "ingot.cli", "ingot.models", "ingot.cache", *MLX),
    "protocol": ("ingot.http", "ingot.cli", "ingot.models", "ingot.cache", "ingot.kernels", "starlette", *MLX),
    "http": ("ingot.cli", "ingot.models", "ingot.cache", "ingot.kernels", *MLX),
    "cli": MLX,
    "agents": ("ingot.engine", "ingot.protocol", "ingot.http", "ingot.cli", "ingot.models", "ingot.text", *MLX),
}
ENGINE_NOUNS = ("ingot.engine.request", "ingot.engine.encoder_request")
"""What protocol and http may know of the engine at run time."""


def imports(path: Path, *, everywhere: bool) -> set[str]:
    """Modules that a file imports: when it is loaded, or anywhere in it (but for type checkers)."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    for path in (ROOT / room).glob("**/*.py"):
        for name in imports(path, everywhere=False):
            assert not any(under(name, banned) for banned in FORBIDDEN[room]), f"{path.name} imports {name}"


@pytest.mark.parametrize("room", ["protocol", "http"])
def test_the_edge_knows_only_the_engines_nouns(room: str) -> None:
    for path in (ROOT / room).glob("**/*.py"):
        for name in imports(path, everywhere=False):
            if under(name, "ingot.engine"):
                assert any(under(name, noun) for noun in ENGINE_NOUNS), f"{path.name} imports {name}"


def test_there_are_no_circles_not_even_for_type_checkers() -> None:
    paths = ROOT.glob("**/*.py")
    modules = {".".join(("ingot", *path.relative_to(ROOT).with_suffix("").parts)): path for path in paths}
    arrows = {name: imports(path, everywhere=True) & modules.keys() - {name} for name, path in modules.items()}
    while free := [name for name, needed in arrows.items() if not needed]:
        for name in free:
            del arrows[name]
        for needed in arrows.values():
            needed.difference_update(free)
    assert not arrows, f"in circles, or behind one: {sorted(arrows)}"
