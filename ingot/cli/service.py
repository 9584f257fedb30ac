"""`ingot service ACTION`: ingot as a service of systemd on Linux, or of launchd on macOS."""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ingot.cli.flags import CommandParser, choose_action
from ingot.errors import ConfigError, IngotError

SERVICE_ACTIONS = {
    "install": "write the service definition, and start it now and whenever the user logs in",
    "uninstall": "stop the service and remove its definition",
    "show": "print the definition without changing anything",
}
RESTART_DELAY_S = 5
STOP_TIMEOUT_S = 45  # to finish requests, and to write cached prefixes to disk
OPEN_FILES = 8192
NO_BUS = (
    ". This user has no session: log in as this user rather than with su or sudo; on a machine where nobody logs in, "
    "run `loginctl enable-linger` first"
)
_BUS = re.compile("Failed to connect to .*bus|not been booted with systemd")
SERVICE_MARK = "Written by `ingot service install`, which `ingot service uninstall` takes back."


@dataclass(frozen=True, slots=True)
class SystemService:
    """A service definition, its path, and the commands that start and stop it."""

    path: Path
    text: str  # contains SERVICE_MARK
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]


def run_service(arguments: list[str]) -> int:
    action = choose_action("service", SERVICE_ACTIONS, arguments)
    if action is None:
        return 0
    parser = CommandParser(f"service {action}", f"For this user: {SERVICE_ACTIONS[action]}.")
    parser.flag("--name", metavar="NAME", default="ingot", help="the name of the service (default: ingot)")
    parser.flag("--config", metavar="FILE", type=Path, help="the TOML file with its settings (default: the user's)")
    flags = parser.parse(arguments[1:])
    service = make_service(sys.platform, flags.name, Path(sys.executable), vars(flags).get("config"))
    if action == "show":
        print(service.text, end="")
    elif action == "install":
        _install_service(service)
    else:
        _uninstall_service(service)
    return 0


def make_service(platform: str, name: str, python: Path, config: Path | None) -> SystemService:
    """Raises ConfigError if the name is not valid, or the settings file does not exist."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ConfigError(f"{name!r} is not a valid name: use letters, digits, dashes and underscores")
    if config is not None and not config.expanduser().is_file():
        raise ConfigError(f"{config} does not exist")
    settings = [] if config is None else ["--config", str(config.expanduser().resolve())]
    command = [str(python), "-m", "ingot", "serve", *settings]
    if platform == "darwin":
        return _launchd_service(name, command)
    if platform.startswith("linux"):
        return _systemd_service(name, command)
    raise ConfigError(f"services are not supported on {platform}")


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
    """Quoted for a unit's command line, where % and $ are special, and spaces separate words."""
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
    """Raises ConfigError if there is another definition of that name, and IngotError, leaving nothing behind, if the
    system does not accept this one."""
    installed = _installed_definition(service)
    if installed is not None and installed != service.text:
        advice = "uninstall it first, or choose" if _is_ours(installed, service) else "ingot did not write it: choose"
        raise ConfigError(f"{service.path} exists and is different; {advice} another --name")
    service.path.parent.mkdir(parents=True, exist_ok=True)
    service.path.write_text(service.text)
    print(f"wrote {service.path}")
    try:
        for command in service.start:
            _run_system_command(command)
    except IngotError as error:
        if installed is not None:
            raise
        _remove_service(service)
        raise IngotError(f"{error.message}; {service.path} was removed again, and nothing is installed") from error
    print("it is running, and starts when you log in; `ingot service uninstall` removes it")


def _uninstall_service(service: SystemService) -> None:
    """Raises ConfigError if there is no definition, or ingot did not write it."""
    installed = _installed_definition(service)
    if installed is None:
        raise ConfigError(f"{service.path} does not exist: no service of that name is installed")
    if not _is_ours(installed, service):
        raise ConfigError(
            f"ingot did not write {service.path}, so it is left alone: stop and remove it by hand if you want to"
        )
    failure = _remove_service(service)
    print(f"removed {service.path}")
    if failure is not None:
        print(f"it could not be stopped, and may still be running: {failure.message}", file=sys.stderr)


def _installed_definition(service: SystemService) -> str | None:
    try:
        return service.path.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _is_ours(definition: str, service: SystemService) -> bool:
    """Earlier versions wrote no mark: their definitions are the same but for it."""
    unmarked = "".join(line for line in service.text.splitlines(keepends=True) if SERVICE_MARK not in line)
    return SERVICE_MARK in definition or definition == unmarked


def _remove_service(service: SystemService) -> IngotError | None:
    """Stop it and remove its files. Returns the error if it cannot be stopped, for example without a session: the
    files are removed nevertheless, or it would start at the next login."""
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise IngotError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        hint = NO_BUS if _BUS.search(output) else ""
        raise IngotError(f"`{' '.join(command)}` failed: {output}{hint}")
