"""Optional packages: which features need them, whether they are installed, and the command that installs them into
this environment (`ingot extras add`, or pip or uv with the packages themselves)."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ingot.errors import ConfigError

DISTRIBUTION: Final = "ingot-mlx"
"""The project's name on a package index, where `ingot` is another one."""
EXTRAS: Final[Mapping[str, Mapping[str, str]]] = {
    "vision": {
        "mlx_vlm": "mlx-vlm>=0.7.10,<0.8",
        "PIL": "pillow>=11,<14",
        "av": "av>=15,<19",
        "pypdfium2": "pypdfium2>=5,<6",
    },
    "audio": {"av": "av>=15,<19"},
    "mcp": {"mcp": "mcp>=2.3,<3"},
    "events": {"zmq": "pyzmq>=26,<28"},
    "otel": {
        "opentelemetry.sdk": "opentelemetry-sdk>=1.30,<2",
        "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http>=1.30,<2",
    },
    "bench": {"matplotlib": "matplotlib>=3.9,<4", "jsonschema": "jsonschema>=4.23,<5"},
}
"""The modules of each extra, and their requirements as in pyproject.toml."""
EXTRA_USES: Final[Mapping[str, str]] = {
    "vision": "vision models",
    "audio": "speech-to-text and text-to-speech",
    "mcp": "tools of MCP servers",
    "events": "`--kv-events`",
    "otel": "`--otlp-traces-endpoint`",
    "bench": "plots of `ingot bench`",
}


def missing_packages(extra: str) -> list[str]:
    """The requirements of an extra that are not installed."""
    return [requirement for module, requirement in EXTRAS[extra].items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def installer() -> list[str]:
    """The command that installs packages into this environment: its own pip or, where it has none, uv."""
    if _is_installed("pip"):
        return [sys.executable, "-m", "pip", "install"]
    return ["uv", "pip", "install", "--python", sys.executable]


def install_command(requirements: Iterable[str]) -> str:
    """The command that installs them for this interpreter."""
    return shlex.join([*installer(), *requirements])


def extras_command(extra: str) -> str:
    """The command that adds an extra to this environment, by the `ingot` that is in it."""
    own = Path(sys.executable).parent / "ingot"
    if (found := shutil.which("ingot")) is not None and Path(found).absolute() == own.absolute():
        return f"ingot extras add {extra}"
    program = [str(own)] if own.is_file() else [sys.executable, "-m", "ingot"]
    return shlex.join([*program, "extras", "add", extra])


def requirement_name(requirement: str) -> str:
    return requirement.partition(">")[0]


def installed_version(requirement: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # which a server does without until it is ready

    try:
        return version(requirement_name(requirement))
    except PackageNotFoundError:
        return None


def unmet_requirements(extra: str) -> list[str]:
    """The requirements of an extra that are not installed, or are in a version that ingot does not take."""
    missing = missing_packages(extra)
    return [each for each in EXTRAS[extra].values() if each in missing or not _accepts(each, installed_version(each))]


def own_requirements() -> list[str]:
    """What ingot itself requires, which packages that are installed later must leave as it is."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return [each for each in requires(DISTRIBUTION) or [] if ";" not in each]
    except PackageNotFoundError:
        return []


def _accepts(requirement: str, found: str | None) -> bool:
    """Whether `name>=A,<B` takes that version."""
    if found is None:
        return False
    low, high = (_release(bound) for bound in requirement.partition(">=")[2].split(",<"))
    return low <= _release(found) < high


def _release(text: str) -> tuple[int, ...]:
    """2.10.1rc1 as (2, 10, 1)."""
    matched = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()


def require_extra(extra: str, feature: str, *, param: str | None = None, instead: str = "") -> None:
    """Raises ConfigError, with the command that installs what is missing, unless `feature` has all it needs. `instead`
    names an alternative."""
    if missing := missing_packages(extra):
        names = " and ".join(map(requirement_name, missing))
        remedy = f"Run `{extras_command(extra)}`{instead and f', {instead}'}"
        raise ConfigError(f"{feature} needs {names}, which this Python does not have. {remedy}", param=param)
