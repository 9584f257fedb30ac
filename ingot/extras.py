"""Packages that only some features need: which they are, whether they are here, and the command that installs them.

The command names this interpreter and the packages themselves: on the package index, `ingot` is another project.
"""

from __future__ import annotations

import importlib.util
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
"""Modules, and what to ask an installer for to have each, as pyproject.toml says it."""


def missing_packages(extra: str) -> list[str]:
    """What an installer would have to be asked for."""
    return [requirement for module, requirement in EXTRAS[extra].items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False


def install_command(requirements: Iterable[str]) -> str:
    """What to run so that this interpreter finds them."""
    python = shlex.quote(sys.executable)
    installer = f"{python} -m pip install" if _is_installed("pip") else f"uv pip install --python {python}"
    return f"{installer} {shlex.join(requirements)}"


def require_extra(extra: str, feature: str, *, param: str | None = None, instead: str = "") -> None:
    """Raises ConfigError, with the command that installs what is missing, where `feature` lacks any of it. `instead` is
    what can be done without it."""
    if wanted := missing_packages(extra):
        names = " and ".join(requirement.partition(">")[0] for requirement in wanted)
        way = f"Run {install_command(wanted)}{instead and f', {instead}'}"
        raise ConfigError(f"{feature} needs {names}, which this Python does not have. {way}", param=param)
