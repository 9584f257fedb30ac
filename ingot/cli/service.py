"""`ingot service ACTION`: have the system start ingot and keep it running, by systemd on Linux, by launchd on a Mac."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ingot.cli.flags import CommandParser
from ingot.errors import ConfigError, IngotError, nearest

ACTIONS = {
    "install": "write the service's definition, and start it now and whenever the user logs in",
    "uninstall": "stop it and remove the definition",
    "show": "print the definition, and change nothing",
}
RESTARTS_S = 5
STOPS_S = 45  # what it may take to finish requests, and to write what is kept to disk
OPEN_FILES = 8192


@dataclass(frozen=True, slots=True)
class Service:
    """A definition, where it goes, and what makes the system know and forget it."""

    path: Path
    text: str
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    action = arguments[0]
    if action not in ACTIONS:
        near = nearest(action, ACTIONS)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(ACTIONS)}"
        raise ConfigError(f"unknown action {action}; {hint}")
    parser = CommandParser(f"service {action}", f"Of this user's service: {ACTIONS[action]}.")
    parser.flag("--name", metavar="NAME", default="ingot", help="what the service is called (default: ingot)")
    parser.flag("--config", metavar="FILE", type=Path, help="the TOML file of its settings (default: the user's)")
    given = parser.parse(arguments[1:])
    service = service_of(sys.platform, given.name, Path(sys.executable), vars(given).get("config"))
    if action == "show":
        print(service.text, end="")
    elif action == "install":
        _install(service)
    else:
        _uninstall(service)
    return 0


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {about}" for name, about in ACTIONS.items())
    return f"usage: ingot service ACTION [FLAGS]\n\n{rows}\n\n`ingot service ACTION --help` lists an action's flags."


def service_of(platform: str, name: str, python: Path, config: Path | None) -> Service:
    """Raises ConfigError where the name cannot be a file's, or the settings' file is not there."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ConfigError(f"{name!r} is no name for a service: letters, digits, dashes and underscores")
    if config is not None and not config.expanduser().is_file():
        raise ConfigError(f"there is no {config}")
    settings = [] if config is None else ["--config", str(config.expanduser().resolve())]
    command = [str(python), "-m", "ingot.cli.main", "serve", *settings]
    if platform == "darwin":
        return _launchd(name, command)
    if platform.startswith("linux"):
        return _systemd(name, command)
    raise ConfigError(f"no way to keep a service running is known on {platform}")


def _systemd(name: str, command: list[str]) -> Service:
    unit = f"{name}.service"
    text = f"""[Unit]
Description=ingot, an inference server

[Service]
ExecStart={" ".join(_unit_word(word) for word in command)}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec={RESTARTS_S}
TimeoutStopSec={STOPS_S}
LimitNOFILE={OPEN_FILES}

[Install]
WantedBy=default.target
"""
    systemctl = ("systemctl", "--user")
    return Service(
        Path("~/.config/systemd/user").expanduser() / unit,
        text,
        start=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", unit)),
        stop=((*systemctl, "disable", "--now", unit),),
    )


def _unit_word(word: str) -> str:
    """As a unit's command line needs it: % and $ mean something there, and spaces part words."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word else word


def _launchd(name: str, command: list[str]) -> Service:
    path = Path("~/Library/LaunchAgents").expanduser() / f"{name}.plist"
    log = str(Path("~/Library/Logs").expanduser() / f"{name}.log")
    text = plistlib.dumps(
        {
            "Label": name,
            "ProgramArguments": command,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTARTS_S,
            "ExitTimeOut": STOPS_S,
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    ).decode()
    domain = f"gui/{os.getuid()}"
    return Service(
        path,
        text,
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{name}"),),
    )


def _install(service: Service) -> None:
    if service.path.exists() and service.path.read_text() != service.text:
        raise ConfigError(f"{service.path} is there and says something else: uninstall it, or choose another --name")
    service.path.parent.mkdir(parents=True, exist_ok=True)
    service.path.write_text(service.text)
    print(f"wrote {service.path}")
    for command in service.start:
        _call(command)
    print("it runs, and starts when you log in; `ingot service uninstall` takes that back")


def _uninstall(service: Service) -> None:
    if not service.path.exists():
        raise ConfigError(f"there is no {service.path}: nothing is installed by that name")
    for command in service.stop:
        _call(command)
    service.path.unlink()
    print(f"removed {service.path}")


def _call(command: tuple[str, ...]) -> None:
    """Raises IngotError with what the system said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise IngotError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise IngotError(f"`{' '.join(command)}` failed: {said or f'exit code {done.returncode}'}")
