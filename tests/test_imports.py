"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ingot"
MODULES = {
    ".".join(("ingot", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.glob("**/*.py")
}
MLX = ("mlx", "mlx_lm", "transformers", "torch")

FLOORS = (
    *("__main__", "cli", "measure", "agents", "http", "mcp", "protocol", "engine", "distributed", "models", "cache"),
    *("kernels", "upstream", "config", "text", "media", "observe", "web", "extras", "errors", "shares", "process"),
    *("quantities", "version"),
)
"""From the top down. Imports go down, or stay."""
CHECKS = {("config", "mcp"), ("config", "protocol"), ("config", "engine"), ("config", "cache")}
"""Settings are checked by who reads them, inside of functions, so that nothing else depends on it."""
WITHOUT = {
    "text": MLX,
    "media": (*MLX, "PIL", "av"),
    "protocol": ("starlette", *MLX, "ingot.models", "ingot.cache", "ingot.kernels"),
    "http": (*MLX, "ingot.models", "ingot.cache", "ingot.kernels"),
    "cli": MLX,
    "models": ("ingot.text",),
}
ENGINE_NOUNS = ("ingot.engine.request", "ingot.engine.speech_request", "ingot.engine.status")
"""What protocol and http may know of the engine at run time."""


def imports(path: Path, *, everywhere: bool) -> frozenset[str]:
    """Modules that a file imports: when it is loaded, or anywhere in it (for type checkers, too)."""
    return _imports(path)[everywhere]


@cache
def _imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    tree = ast.parse(path.read_text())
    return _imported(tree.body), _imported(_statements(tree))


def _imported(statements: Iterable[ast.stmt]) -> frozenset[str]:
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All of a module's. No expression holds a statement, so none is looked into."""
    below: list[ast.AST] = [tree]
    while below:
        node = below.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                below.append(child)
                if isinstance(child, ast.stmt):
                    yield child


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_is_on_a_floor() -> None:
    assert {room(name) for name in MODULES if name != "ingot"} == set(FLOORS)


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_go_down(floor: str) -> None:
    for name, path in MODULES.items():
        if name == "ingot" or room(name) != floor:
            continue
        for other in imports(path, everywhere=True) & MODULES.keys():
            below = FLOORS.index(room(other)) >= FLOORS.index(floor)
            assert below or (floor, room(other)) in CHECKS, f"{name} imports {other}"


@pytest.mark.parametrize("floor", WITHOUT)
def test_a_room_does_without_what_is_not_its_business(floor: str) -> None:
    for name, path in MODULES.items():
        if room(f"{name}.") == floor:
            for other in imports(path, everywhere=False):
                assert not any(under(other, banned) for banned in WITHOUT[floor]), f"{name} imports {other}"


@pytest.mark.parametrize("floor", ["protocol", "http"])
def test_the_edge_knows_only_the_engines_nouns(floor: str) -> None:
    for name, path in MODULES.items():
        if room(f"{name}.") == floor:
            for other in imports(path, everywhere=False):
                if under(other, "ingot.engine"):
                    assert any(under(other, noun) for noun in ENGINE_NOUNS), f"{name} imports {other}"


def test_settings_look_upwards_only_inside_of_functions() -> None:
    for name, path in MODULES.items():
        if room(f"{name}.") == "config":
            for other in imports(path, everywhere=False):
                assert not under(other, "ingot") or room(other) in ("config", "errors", "quantities", "text"), (
                    f"{name} imports {other}"
                )


def test_the_engines_loop_knows_nothing_of_what_it_runs() -> None:
    found = {name for name in imports(MODULES["ingot.engine.loop"], everywhere=True) if under(name, "ingot")}
    assert all(under(name, "ingot.errors") or under(name, "ingot.kernels.device") for name in found)


def test_there_are_no_circles_not_even_for_type_checkers() -> None:
    arrows = {name: {*imports(path, everywhere=True) & MODULES.keys()} - {name} for name, path in MODULES.items()}
    while free := [name for name, needed in arrows.items() if not needed]:
        for name in free:
            del arrows[name]
        for needed in arrows.values():
            needed.difference_update(free)
    assert not arrows, f"in circles, or behind one: {sorted(arrows)}"


def test_one_place_imports_mlx_lm() -> None:
    for name, path in MODULES.items():
        if name != "ingot.upstream":
            assert not any(under(other, "mlx_lm") for other in imports(path, everywhere=True)), name
