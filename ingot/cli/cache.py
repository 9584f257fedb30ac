"""`ingot cache ACTION`: what a running server's prefix cache holds, what a request would find in it, and the folder of
the disk tier, whether a server runs or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli.client import ServerClient
from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from ingot.cache.disk.survey import ScopeSurvey

FOLDER_ACTIONS = {
    "list": "what is in a folder of kept prefixes, by model",
    "verify": "read every record in a folder and check it; changes nothing",
    "trim": "remove what was used longest ago from a folder, of all models",
}


def _folder_arguments(action: str, arguments: list[str], **more: Any) -> tuple[Path, dict[str, Any]]:
    parser = CommandParser(f"cache {action}", f"{FOLDER_ACTIONS[action][0].upper()}{FOLDER_ACTIONS[action][1:]}.")
    parser.flag("--cache-dir", "--ssd-cache-dir", dest="cache_dir", metavar="PATH", help="the folder")
    parser.flag("--json", action="store_true", help="print it as JSON")
    for name, options in more.items():
        parser.flag(name, **options)
    add_settings(parser, ("the rest",))
    namespace = parser.parse(arguments)
    folder = settings_from_arguments(namespace).settings.cache_dir
    if folder is None:
        raise ConfigError("which folder? Name it with --cache-dir, INGOT_CACHE_DIR or cache_dir in the config file")
    return folder, vars(namespace)


@contextmanager
def _reading_folder(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}") from error


def list_cache_folder(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import FolderSurvey

    folder, given = _folder_arguments("list", arguments)
    with _reading_folder(folder):
        found = FolderSurvey.of(folder)
    if "json" in given:
        scopes = [
            {"scope": each.scope, "about": each.about, "records": len(each.files), "bytes": each.nbytes}
            for each in found.scopes
        ]
        damaged = sum(file.nbytes for file in found.damaged)
        print(json.dumps({"bytes": found.nbytes, "damaged_bytes": damaged, "scopes": scopes}, indent=2))
        return 0
    print(f"{_format_bytes(found.nbytes)} in {folder}")
    for scope in found.scopes:
        print(_format_scope(scope))
    if found.damaged:
        print(
            f"damaged, set aside: {len(found.damaged)} files, "
            f"{_format_bytes(sum(file.nbytes for file in found.damaged))}"
        )
    return 0


def _format_scope(scope: ScopeSurvey) -> str:
    about = ", ".join(f"{name} {value}" for name, value in scope.about.items()) or "of an unknown model"
    newest = max(file.changed for file in scope.files)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return f"{scope.scope}: {len(scope.files)} records, {_format_bytes(scope.nbytes)}, the newest of {when}\n  {about}"


def verify_cache_folder(arguments: list[str]) -> int:
    """1 where something is damaged."""
    from ingot.cache.disk.survey import FolderSurvey

    folder, given = _folder_arguments("verify", arguments)
    with _reading_folder(folder):
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


def trim_cache_folder(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import trim_folder

    gigabytes = {"metavar": "X", "type": float, "help": "most gigabytes that stay (0: nothing but other files)"}
    folder, given = _folder_arguments("trim", arguments, **{"--to-gb": gigabytes})
    most = given.get("to_gb")
    if most is None or not 0 <= most < 1e6:
        raise ConfigError("how much is to stay? Say it with --to-gb, in gigabytes from 0 on")
    with _reading_folder(folder):
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}")
        freed = trim_folder(folder, int(most * 1e9))
    print(json.dumps({"freed_bytes": freed}) if "json" in given else f"freed {_format_bytes(freed)}")
    return 0


def _format_bytes(count: int) -> str:
    from ingot.models.files.progress import format_bytes

    return format_bytes(count)


CACHE_DEFAULT_URL = "http://127.0.0.1:8000"
CACHE_ACTIONS = {
    "show": "how much is kept, under which salts, and what it was good for",
    "explain": "what a request would take over if it came now, and why no more",
    "clear": "forget all that is kept of this key's prompts",
    "export": "write all that is kept of this key's prompts to a file",
    "import": "keep what is in a file that this server, or one that shares its archive key, wrote",
    **FOLDER_ACTIONS,
}


def run_cache(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_cache_usage())
        return 0
    action = arguments[0]
    if action not in CACHE_ACTIONS:
        near = nearest_name(action, CACHE_ACTIONS)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(CACHE_ACTIONS)}"
        raise ConfigError(f"unknown action {action}; {hint}")
    return _CACHE_COMMANDS[action](arguments[1:])


def _cache_usage() -> str:
    rows = "\n".join(f"  {name:<8} {about}" for name, about in CACHE_ACTIONS.items())
    return f"usage: ingot cache ACTION [FLAGS]\n\n{rows}\n\n`ingot cache ACTION --help` lists an action's flags."


def _cache_parser(action: str) -> CommandParser:
    parser = CommandParser(f"cache {action}", f"Of a running server: {CACHE_ACTIONS[action]}.")
    parser.flag("--url", metavar="URL", help=f"the server (default: {CACHE_DEFAULT_URL})")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    parser.flag("--json", action="store_true", help="print the server's answer as it is")
    add_settings(parser, ("the rest",))
    return parser


def _server_client(
    parser: CommandParser, arguments: list[str], *, administering: bool = False
) -> tuple[ServerClient, dict[str, Any]]:
    """A client and what was given. The administrator's key is for what only the administrator may."""
    namespace = parser.parse(arguments)
    settings = settings_from_arguments(namespace).settings
    given = vars(namespace)
    known = [settings.api_key, settings.admin_api_key]
    keys = known[::-1] if administering and "api_key" not in given else known
    return ServerClient(
        given.get("url", CACHE_DEFAULT_URL), next((key for key in keys if key is not None), None)
    ), given


def _print_answer(answer: Any, given: dict[str, Any], told: Callable[[Any], str]) -> int:
    print(json.dumps(answer, indent=2, ensure_ascii=False) if "json" in given else told(answer))
    return 0


def _show_cache(arguments: list[str]) -> int:
    client, given = _server_client(_cache_parser("show"), arguments)
    return _print_answer(client.get("cache"), given, format_cache_status)


def _clear_cache(arguments: list[str]) -> int:
    client, given = _server_client(_cache_parser("clear"), arguments)
    return _print_answer(client.delete("cache"), given, lambda answer: f"freed {_format_bytes(answer['freed_bytes'])}")


def _explain_cache(arguments: list[str]) -> int:
    parser = _cache_parser("explain")
    parser.add_argument(
        "file", metavar="FILE", help="the request's body, JSON as it would be sent; - reads it from here"
    )
    client, given = _server_client(parser, arguments)
    return _print_answer(client.post("cache/explain", _read_body(given["file"])), given, format_explanation)


def _export_cache(arguments: list[str]) -> int:
    parser = _cache_parser("export")
    parser.add_argument("file", metavar="FILE", help="where to")
    parser.flag("--force", action="store_true", help="write over a file that is there")
    client, given = _server_client(parser, arguments)
    path = Path(given["file"])
    if path.exists() and "force" not in given:
        raise ConfigError(f"{path} is there already; --force writes over it")
    try:
        _download_export(client, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return _print_answer(
        {"file": str(path), "bytes": path.stat().st_size}, given, lambda told: f"wrote {_format_bytes(told['bytes'])}"
    )


def _download_export(client: ServerClient, path: Path) -> None:
    """Under another name until all of it is there: half a file is worse than none, and than the one before."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            client.download("cache/export", file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _import_cache(arguments: list[str]) -> int:
    parser = _cache_parser("import")
    parser.add_argument("file", metavar="FILE", help="a file that `ingot cache export` wrote")
    client, given = _server_client(parser, arguments, administering=True)
    try:
        file = Path(given["file"]).open("rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"cannot read {given['file']}: {error.strerror}") from error
    with file:
        answer = client.upload("cache/import", file)
    return _print_answer(answer, given, lambda told: f"{told['added_tokens']} tokens are kept that were not before")


_CACHE_COMMANDS = {
    "show": _show_cache,
    "explain": _explain_cache,
    "clear": _clear_cache,
    "export": _export_cache,
    "import": _import_cache,
    "list": list_cache_folder,
    "verify": verify_cache_folder,
    "trim": trim_cache_folder,
}


def _read_body(name: str) -> dict[str, Any]:
    try:
        body = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{name} holds no request: that is an object with 'messages', 'prompt' or 'input'")
    return body


def format_cache_status(answer: Any) -> str:
    """The state of the cache, in words."""
    used, limit = _format_bytes(answer["used_bytes"]), _format_bytes(answer["limit_bytes"])
    taken = answer["matched_tokens"] / answer["prompt_tokens"] if answer["prompt_tokens"] else 0.0
    lines = [
        f"{used} of {limit} are used; {answer['evictions']} pieces had to go so far",
        f"{answer['hits']} of {answer['prompts']} prompts found something: {answer['matched_tokens']} of "
        f"{answer['prompt_tokens']} tokens ({taken:.0%}) did not have to be computed",
    ]
    codecs = [("kept in", "codec"), ("running sequences in", "live_codec")]
    lines += [f"{what} {answer[name]}" for what, name in codecs if answer.get(name, "raw") != "raw"]
    if disk := answer.get("disk"):
        lines.append(f"on disk: {_format_bytes(disk['used_bytes'])} in {disk['records']} records")
    if totals := answer.get("totals"):
        lines.append(
            f"all keys together: {_format_bytes(totals['used_bytes'])} of {totals['tenants']} keys; "
            f"{totals['evictions']} "
            "pieces had to go so far"
        )
        lines += _format_disk_totals(totals.get("disk"))
    for salt in answer["salts"]:
        name = f"salt {salt['salt']!r}" if salt["salt"] else "no salt"
        pinned = f", {salt['pinned_tokens']} of them pinned" if salt["pinned_tokens"] else ""
        points = f", {salt['checkpoints']} checkpoints" if salt["checkpoints"] else ""
        lines.append(
            f"{name}: {salt['tokens']} tokens{pinned} in {salt['records']} records{points}, "
            f"{_format_bytes(salt['bytes'])}"
        )
    return "\n".join(lines)


def _format_disk_totals(disk: Any) -> list[str]:
    if not disk:
        return []
    failed = disk["spill_failures"] + disk["promotion_failures"]
    return [
        f"all keys together on disk: {_format_bytes(disk['used_bytes'])} in {disk['records']} records of this "
        f"model; all "
        f"files in the folder take {_format_bytes(disk['folder_bytes'])} of {_format_bytes(disk['limit_bytes'])}",
        f"  written: {disk['spills']} records, {_format_bytes(disk['spilled_bytes'])} in {disk['spill_s']:.1f} s; "
        f"{disk['dropped']} were not, as too many waited",
        f"  read: {disk['promotions']} records, {_format_bytes(disk['promoted_bytes'])} in "
        f"{disk['promotion_s']:.1f} s, for "
        f"{disk['hits']} prompts; {disk['misses']} found nothing there; {failed} records failed",
    ]


def format_explanation(answer: Any) -> str:
    """What would match, and why no more."""
    cache = answer["cache"]
    source = " from disk" if cache.get("tier") == "disk" else ""
    matched, whole = cache["matched_tokens"], answer["prompt_tokens"]
    lines = [f"{matched} of {whole} tokens would be taken over{source}: {cache['reason']}"]
    each = cache.get("prompts") or [cache]
    for number, prompt in enumerate(each):
        if len(each) > 1:
            lines.append(f"prompt {number}: {prompt['matched_tokens']} tokens: {prompt['reason']}")
        if prompt["diverged"] is not None:
            lines += _format_divergence(prompt["diverged"])
    return "\n".join(lines)


def _format_divergence(place: Any) -> list[str]:
    where = "the prompt" if place["message"] is None else f"message {place['message']} ({place['role']})"
    return [
        f"they part in {where}, at character {place['character']}:",
        f"  this request: {place['ours']!r}",
        f"  what is kept: {place['theirs']!r}",
    ]
