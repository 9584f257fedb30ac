"""`ingot cache list|verify|trim`: the folder that servers keep prefixes in, whether one runs or not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.cache.disk.survey import ScopeSurvey

ACTIONS = {
    "list": "what is in a folder of kept prefixes, by model",
    "verify": "read every record in a folder and check it; changes nothing",
    "trim": "remove what was used longest ago from a folder, of all models",
}


def _begun(action: str, arguments: list[str], **more: Any) -> tuple[Path, dict[str, Any]]:
    parser = CommandParser(f"cache {action}", f"{ACTIONS[action][0].upper()}{ACTIONS[action][1:]}.")
    parser.flag("--cache-dir", "--ssd-cache-dir", dest="cache_dir", metavar="PATH", help="the folder")
    parser.flag("--json", action="store_true", help="print it as JSON")
    for name, options in more.items():
        parser.flag(name, **options)
    add_settings(parser, ("the rest",))
    namespace = parser.parse(arguments)
    folder = settle(namespace).settings.cache_dir
    if folder is None:
        raise ConfigError("which folder? Name it with --cache-dir, INGOT_CACHE_DIR or cache_dir in the config file")
    return folder, vars(namespace)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}") from error


def listed(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import FolderSurvey

    folder, given = _begun("list", arguments)
    with _readable(folder):
        found = FolderSurvey.of(folder)
    if "json" in given:
        scopes = [
            {"scope": each.scope, "about": each.about, "records": len(each.files), "bytes": each.nbytes}
            for each in found.scopes
        ]
        damaged = sum(file.nbytes for file in found.damaged)
        print(json.dumps({"bytes": found.nbytes, "damaged_bytes": damaged, "scopes": scopes}, indent=2))
        return 0
    print(f"{_bytes(found.nbytes)} in {folder}")
    for scope in found.scopes:
        print(_told(scope))
    if found.damaged:
        print(f"damaged, set aside: {len(found.damaged)} files, {_bytes(sum(file.nbytes for file in found.damaged))}")
    return 0


def _told(scope: ScopeSurvey) -> str:
    about = ", ".join(f"{name} {value}" for name, value in scope.about.items()) or "of an unknown model"
    newest = max(file.changed for file in scope.files)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return f"{scope.scope}: {len(scope.files)} records, {_bytes(scope.nbytes)}, the newest of {when}\n  {about}"


def verify(arguments: list[str]) -> int:
    """1 where something is damaged."""
    from ingot.cache.disk.survey import FolderSurvey

    folder, given = _begun("verify", arguments)
    with _readable(folder):
        found = FolderSurvey.of(folder)
        problems = list(found.problems())
    count = sum(len(scope.files) for scope in found.scopes)
    if "json" in given:
        stated = [{"file": str(path), "problem": problem} for path, problem in problems]
        print(json.dumps({"records": count, "damaged": stated}, indent=2))
    else:
        for path, problem in problems:
            print(f"{path}: {problem}")
        print(f"{count - len(problems)} of {count} records are as they were written")
    return 1 if problems else 0


def trimmed(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import trim

    gigabytes = {"metavar": "X", "type": float, "help": "most gigabytes that stay (0: nothing but other files)"}
    folder, given = _begun("trim", arguments, **{"--to-gb": gigabytes})
    most = given.get("to_gb")
    if most is None or not 0 <= most < 1e6:
        raise ConfigError("how much is to stay? Say it with --to-gb, in gigabytes from 0 on")
    with _readable(folder):
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}")
        freed = trim(folder, int(most * 1e9))
    print(json.dumps({"freed_bytes": freed}) if "json" in given else f"freed {_bytes(freed)}")
    return 0


def _bytes(count: int) -> str:
    from ingot.models.files.progress import format_bytes

    return format_bytes(count)
