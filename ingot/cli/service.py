"""`ingot service ACTION`: have the system start ingot and keep it running, by systemd on Linux, by launchd on a Mac."""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ingot.cli.flags import CommandParser
from ingot.errors import ConfigError, IngotError, nearest_name

SERVICE_ACTIONS = {
    "install": "write the service's definition, and start it now and whenever the user logs in",
    "uninstall": "stop it and remove the definition",
    "show": "print the definition, and change nothing",
}
RESTART_DELAY_S = 5
STOP_TIMEOUT_S = 45  # what it may take to finish requests, and to write what is kept to disk
OPEN_FILES = 8192
NO_BUS = (
    ". There is no session of this user's to ask: log in as this user rather than by su or sudo, or, where nobody logs "
    "in, run `loginctl enable-linger` first"
)
_BUS = re.compile("Failed to connect to .*bus|not been booted with systemd")
SERVICE_MARK = "Written by `ingot service install`, which `ingot service uninstall` takes back."


@dataclass(frozen=True, slots=True)
class SystemService:
    """A definition, where it goes, and what makes the system know and forget it."""

    path: Path
    text: str  # with the mark, by which it is known for ingot's
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]


def run_service(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_service_usage())
        return 0
    action = arguments[0]
    if action not in SERVICE_ACTIONS:
        near = nearest_name(action, SERVICE_ACTIONS)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(SERVICE_ACTIONS)}"
        raise ConfigError(f"unknown action {action}; {hint}")
    parser = CommandParser(f"service {action}", f"Of this user's service: {SERVICE_ACTIONS[action]}.")
    parser.flag("--name", metavar="NAME", default="ingot", help="what the service is called (default: ingot)")
    parser.flag("--config", metavar="FILE", type=Path, help="the TOML file of its settings (default: the user's)")
    given = parser.parse(arguments[1:])
    service = make_service(sys.platform, given.name, Path(sys.executable), vars(given).get("config"))
    if action == "show":
        print(service.text, end="")
    elif action == "install":
        _install_service(service)
    else:
        _uninstall_service(service)
    return 0


def _service_usage() -> str:
    rows = "\n".join(f"  {name:<10} {about}" for name, about in SERVICE_ACTIONS.items())
    return f"usage: ingot service ACTION [FLAGS]\n\n{rows}\n\n`ingot service ACTION --help` lists an action's flags."


def make_service(platform: str, name: str, python: Path, config: Path | None) -> SystemService:
    """Raises ConfigError where the name cannot be a file's, or the settings' file is not there."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ConfigError(f"{name!r} is no name for a service: letters, digits, dashes and underscores")
    if config is not None and not config.expanduser().is_file():
        raise ConfigError(f"there is no {config}")
    settings = [] if config is None else ["--config", str(config.expanduser().resolve())]
    command = [str(python), "-m", "ingot.cli.main", "serve", *settings]
    if platform == "darwin":
        return _launchd_service(name, command)
    if platform.startswith("linux"):
        return _systemd_service(name, command)
    raise ConfigError(f"no way to keep a service running is known on {platform}")


def _systemd_service(name: str, command: list[str]) -> SystemService:
    unit = f"{name}.service"
    text = f"""# {SERVICE_MARK}
[Unit]
Description=ingot, an inference server

[Service]
ExecStart={" ".join(_quote_unit_word(word) for word in command)}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec={RESTART_DELAY_S}
TimeoutStopSec={STOP_TIMEOUT_S}
LimitNOFILE={OPEN_FILES}

[Install]
WantedBy=default.target
"""
    systemctl = ("systemctl", "--user")
    return SystemService(
        Path("~/.config/systemd/user").expanduser() / unit,
        text,
        start=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", unit)),
        stop=((*systemctl, "disable", "--now", unit),),
    )


def _quote_unit_word(word: str) -> str:
    """As a unit's command line needs it: % and $ mean something there, and spaces part words."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word else word


def _launchd_service(name: str, command: list[str]) -> SystemService:
    path = Path("~/Library/LaunchAgents").expanduser() / f"{name}.plist"
    log = str(Path("~/Library/Logs").expanduser() / f"{name}.log")
    text = plistlib.dumps(
        {
            "Label": name,
            "ProgramArguments": command,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_DELAY_S,
            "ExitTimeOut": STOP_TIMEOUT_S,
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    ).decode()
    text = text.replace("<plist", f"<!-- {SERVICE_MARK} -->\n<plist", 1)
    domain = f"gui/{os.getuid()}"
    return SystemService(
        path,
        text,
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{name}"),),
    )


def _install_service(service: SystemService) -> None:
    """Raises ConfigError where another definition has the name, and IngotError, with nothing left behind, where the
    system does not take this one."""
    there = _installed_definition(service)
    if there is not None and there != service.text:
        way = "uninstall it first, or choose" if _is_ours(there, service) else "ingot did not write it: choose"
        raise ConfigError(f"{service.path} is there and says something else; {way} another --name")
    service.path.parent.mkdir(parents=True, exist_ok=True)
    service.path.write_text(service.text)
    print(f"wrote {service.path}")
    try:
        for command in service.start:
            _run_system_command(command)
    except IngotError as error:
        if there is not None:
            raise
        _remove_service(service)
        raise IngotError(f"{error.message}; {service.path} is removed again, and nothing is installed") from error
    print("it runs, and starts when you log in; `ingot service uninstall` takes that back")


def _uninstall_service(service: SystemService) -> None:
    """Raises ConfigError where there is no definition, or none of ingot's."""
    there = _installed_definition(service)
    if there is None:
        raise ConfigError(f"there is no {service.path}: nothing is installed by that name")
    if not _is_ours(there, service):
        raise ConfigError(
            f"ingot did not write {service.path}, and leaves it: if it is to go, stop and remove it by hand"
        )
    failure = _remove_service(service)
    print(f"removed {service.path}")
    if failure is not None:
        print(f"it could not be stopped, and runs on if it runs: {failure.message}", file=sys.stderr)


def _installed_definition(service: SystemService) -> str | None:
    try:
        return service.path.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _is_ours(definition: str, service: SystemService) -> bool:
    """Those of earlier versions have no mark, and are known by being what would be written now but for that."""
    unmarked = "".join(line for line in service.text.splitlines(keepends=True) if SERVICE_MARK not in line)
    return SERVICE_MARK in definition or definition == unmarked


def _remove_service(service: SystemService) -> IngotError | None:
    """Stop it if that can be done, and remove its files. What the system says against stopping it is returned: without
    a session there is nothing to ask, and a definition that stays would start it at the next login."""
    failure = None
    try:
        for command in service.stop:
            _run_system_command(command)
    except IngotError as error:
        failure = error
    enabled = (
        service.path.parent / "default.target.wants" / service.path.name
    )  # systemd's link, which it removes itself
    enabled.unlink(missing_ok=True)
    service.path.unlink()
    return failure


def _run_system_command(command: tuple[str, ...]) -> None:
    """Raises IngotError with what the system said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise IngotError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        hint = NO_BUS if _BUS.search(said) else ""
        raise IngotError(f"`{' '.join(command)}` failed: {said}{hint}")
