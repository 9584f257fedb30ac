"""What `python -m build` makes of the tree, and whether the numbers in both packages' metadata agree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ingot.version import __version__

ROOT = Path(__file__).parents[2]
BUILT = shutil.ignore_patterns("__pycache__", "*.so")
NATIVE = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as what earlier builds leave in a tree (lists of files, say) ends up in later ones."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "ingot", tree / "ingot", ignore=BUILT)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tree.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"ingot_mlx-{__version__}.dist-info/METADATA").decode())


def required(metadata: Message, *, extra: str = "") -> list[Requirement]:
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    return [each for each in found if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)]


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(wheel.parent) for path in (wheel.parent / "ingot").rglob("*") if path.is_file()}
    assert held == {str(path) for path in files}


def test_the_wheel_fits_every_platform_and_brings_the_command_and_the_licence(wheel: Path) -> None:
    assert wheel.name == f"ingot_mlx-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"ingot_mlx-{__version__}.dist-info"
        assert "ingot = ingot.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def test_one_extra_brings_the_kernels_of_the_same_version(metadata: Message) -> None:
    needed = {each.name: each for each in required(metadata, extra="cpu")}
    assert str(needed["ingot-native"].specifier) == f"=={__version__}"
    assert needed["mlx"].extras == {"cpu"}


def test_no_backend_is_installed_unless_it_is_asked_for(metadata: Message) -> None:
    assert all(not each.extras and each.name != "ingot-native" for each in required(metadata))
    assert "ingot-native" not in {each.name for each in required(metadata, extra="cuda")}


def test_the_kernels_are_built_for_an_mlx_that_the_server_takes(metadata: Message) -> None:
    (taken,) = (each for each in required(metadata) if each.name == "mlx")
    lines = (*NATIVE["build-system"]["requires"], *NATIVE["project"]["dependencies"])
    built = [Requirement(line) for line in lines if line.startswith("mlx")]
    assert len(built) == 2 and built[0].specifier == built[1].specifier
    (only,) = built[0].specifier
    assert only.operator == "==" and Version(only.version) in taken.specifier


def test_both_packages_take_their_version_from_one_place() -> None:
    assert "version" in NATIVE["project"]["dynamic"]
    source = NATIVE["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert (ROOT / "native" / source).resolve() == ROOT / "ingot" / "version.py"
