"""Optional packages: which features need them, whether they are installed, and the command that installs them.

The command names this interpreter and the packages themselves: on the package index, `ingot` is another project.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from ingot.errors import ConfigError

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
    "bench": {"matplotlib": "matplotlib>=3.9,<4"},
}
"""The modules of each extra, and their requirements as in pyproject.toml."""


def missing_packages(extra: str) -> list[str]:
    """The requirements of an extra that are not installed."""
    return [requirement for module, requirement in EXTRAS[extra].items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def install_command(requirements: Iterable[str]) -> str:
    """The command that installs them for this interpreter."""
    python = shlex.quote(sys.executable)
    installer = f"{python} -m pip install" if _is_installed("pip") else f"uv pip install --python {python}"
    return f"{installer} {shlex.join(requirements)}"


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
        names = " and ".join(requirement.partition(">")[0] for requirement in missing)
        remedy = f"Run {install_command(missing)}{instead and f', {instead}'}"
        raise ConfigError(f"{feature} needs {names}, which this Python does not have. {remedy}", param=param)
