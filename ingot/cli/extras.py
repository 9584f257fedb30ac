"""`ingot extras`: list the optional packages, and install those of an extra into this environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from ingot.cli.flags import CommandParser
from ingot.errors import ConfigError, IngotError, nearest_name
from ingot.extras import (
    DISTRIBUTION,
    EXTRA_USES,
    EXTRAS,
    extras_command,
    installed_version,
    installer,
    own_requirements,
    requirement_name,
    unmet_requirements,
)

ABOUT_EXTRAS: Final = "List optional packages, with what each is for; `ingot extras add NAME` installs them here."
PIPX_FILE: Final = "pipx_metadata.json"
"""pipx keeps one in each environment of its own."""


def run_extras(arguments: list[str]) -> int:
    parser = CommandParser("extras", ABOUT_EXTRAS)
    parser.add_argument("action", nargs="?", choices=("add",), metavar="add", help="install the extras that follow")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(EXTRAS)}")
    parser.flag("--json", action="store_true", help="print the list as JSON")
    namespace = parser.parse(arguments)
    if namespace.action is None:
        _print_extras(as_json="json" in vars(namespace))
        return 0
    return add_extras(namespace.names)


def _print_extras(*, as_json: bool) -> None:
    extras = [_describe(name) for name in EXTRAS]
    if as_json:
        print(json.dumps({"python": sys.executable, "extras": extras}, indent=2))
        return
    width = max(len(EXTRA_USES[name]) for name in EXTRAS)
    for each in extras:
        packages = ", ".join(f"{package} {found or '(missing)'}" for package, found in each["packages"].items())
        print(f"{each['name']:<8}{each['state']:<11}{each['for']:<{width}}  {packages}")
    print(f"\n`{extras_command('NAME')}` installs what is missing")


def _describe(name: str) -> dict[str, Any]:
    unmet = unmet_requirements(name)
    packages = {requirement_name(each): installed_version(each) for each in EXTRAS[name].values()}
    outdated = [each for each in unmet if packages[requirement_name(each)] is not None]
    state = "installed" if not unmet else "outdated" if len(outdated) == len(unmet) else "missing"
    return {"name": name, "state": state, "for": EXTRA_USES[name], "packages": packages, "wanted": unmet}


def add_extras(names: list[str]) -> int:
    """Install what the extras lack, in the versions that ingot takes. Raises ConfigError for an unknown one, and
    IngotError where there is nothing to install it with."""
    if not names:
        raise ConfigError(f"say which: {', '.join(EXTRAS)}")
    for name in names:
        if name not in EXTRAS:
            near = nearest_name(name, EXTRAS)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(EXTRAS)}"
            raise ConfigError(f"there is no extra {name!r}; {hint}")
    wanted = list(dict.fromkeys(each for name in names for each in unmet_requirements(name)))
    if not wanted:
        print(f"{', '.join(names)}: installed")
        return 0
    command = [*_environment_installer(), *wanted]
    if shutil.which(command[0]) is None:
        raise IngotError(
            f"this environment has neither pip nor uv to install packages with; run {sys.executable} -m ensurepip first"
        )
    print(f"installing {', '.join(wanted)} into {sys.prefix}", file=sys.stderr)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(own_requirements()))
        constraints.flush()
        bound = ["--pip-args", f"-c {constraints.name}"] if command[0] == "pipx" else ["-c", constraints.name]
        done = subprocess.run([*command, *bound], check=False)
    if done.returncode != 0:
        raise IngotError(f"{command[0]} could not install them (exit code {done.returncode}); its output says why")
    print(f"{', '.join(names)}: installed")
    return 0


def _environment_installer() -> list[str]:
    """pipx puts packages back when it installs a program anew, so it must know of them."""
    if (Path(sys.prefix) / PIPX_FILE).is_file() and shutil.which("pipx") is not None:
        return ["pipx", "inject", DISTRIBUTION]
    return installer()
