"""Optional packages: which features need them, whether they are installed, and the command that installs them.

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


def require_extra(extra: str, feature: str, *, param: str | None = None, instead: str = "") -> None:
    """Raises ConfigError, with the command that installs what is missing, unless `feature` has all it needs. `instead`
    names an alternative."""
    if missing := missing_packages(extra):
        names = " and ".join(requirement.partition(">")[0] for requirement in missing)
        remedy = f"Run {install_command(missing)}{instead and f', {instead}'}"
        raise ConfigError(f"{feature} needs {names}, which this Python does not have. {remedy}", param=param)
