"""`ingot cache ACTION`: the prefix cache of a running server, what a request would reuse of it, and folders of
`--cache-dir`, for which no server has to run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.cli.client import ServerClient
from ingot.cli.flags import DEFAULT_URL, CommandParser, add_settings, choose_action, settings_from_arguments
from ingot.errors import ConfigError
from ingot.quantities import counted, format_bytes

if TYPE_CHECKING:
    from ingot.cache.disk.survey import ScopeSurvey

FOLDER_ACTIONS = {
    "list": "list the records in a cache folder, by model",
    "verify": "read every record in a cache folder and check it",
    "trim": "remove the least recently used records of all models from a cache folder",
}


def _folder_arguments(action: str, arguments: list[str], **more: Any) -> tuple[Path, dict[str, Any]]:
    parser = CommandParser(f"cache {action}", f"{FOLDER_ACTIONS[action][0].upper()}{FOLDER_ACTIONS[action][1:]}.")
    parser.flag("--cache-dir", "--ssd-cache-dir", dest="cache_dir", metavar="PATH", help="the cache folder")
    parser.flag("--json", action="store_true", help="print it as JSON")
    for name, options in more.items():
        parser.flag(name, **options)
    add_settings(parser, ("the rest",))
    namespace = parser.parse(arguments)
    folder = settings_from_arguments(namespace).settings.cache_dir
    if folder is None:
        raise ConfigError("no cache folder: name it with --cache-dir, INGOT_CACHE_DIR or cache_dir in the config file")
    return folder, vars(namespace)


@contextmanager
def _reading_folder(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}") from error


def list_cache_folder(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import FolderSurvey

    folder, flags = _folder_arguments("list", arguments)
    with _reading_folder(folder):
        survey = FolderSurvey.of(folder)
    damaged = sum(file.nbytes for file in survey.damaged)
    if "json" in flags:
        scopes = [
            {"scope": each.scope, "about": each.about, "records": len(each.files), "bytes": each.nbytes}
            for each in survey.scopes
        ]
        print(json.dumps({"bytes": survey.nbytes, "damaged_bytes": damaged, "scopes": scopes}, indent=2))
        return 0
    print(f"{format_bytes(survey.nbytes)} in {folder}")
    for scope in survey.scopes:
        print(_format_scope(scope))
    if survey.damaged:
        print(f"damaged, set aside: {counted(len(survey.damaged), 'file')}, {format_bytes(damaged)}")
    return 0


HIDDEN_DIGESTS = ("model", "tokenizer")
"""What tells models apart, which says nothing to people; `--json` has it."""


def _format_scope(scope: ScopeSurvey) -> str:
    from ingot.cache.disk.store import NAME_FIELD

    about = {name: value for name, value in scope.about.items() if name not in HIDDEN_DIGESTS}
    name = about.pop(NAME_FIELD, "") or f"a model without a stored name ({scope.scope[:12]})"
    newest = max(file.changed for file in scope.files)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    size = f"{counted(len(scope.files), 'record')}, {format_bytes(scope.nbytes)}, the newest from {when}"
    rest = ", ".join(f"{name} {value}" for name, value in about.items())
    return f"{name}: {size}" + (f"\n  {rest}" if rest else "")


def verify_cache_folder(arguments: list[str]) -> int:
    """Returns 1 if a record is damaged."""
    from ingot.cache.disk.survey import FolderSurvey

    folder, flags = _folder_arguments("verify", arguments)
    with _reading_folder(folder):
        survey = FolderSurvey.of(folder)
        problems = list(survey.problems())
    count = sum(len(scope.files) for scope in survey.scopes)
    if "json" in flags:
        damaged = [{"file": str(path), "problem": problem} for path, problem in problems]
        print(json.dumps({"records": count, "damaged": damaged}, indent=2))
    else:
        for path, problem in problems:
            print(f"{path}: {problem}")
        print(f"{count - len(problems)} of {counted(count, 'record')} intact")
    return 1 if problems else 0


def trim_cache_folder(arguments: list[str]) -> int:
    from ingot.cache.disk.survey import trim_folder

    gigabytes = {"metavar": "X", "type": float, "help": "gigabytes to keep at most (0: remove all records)"}
    folder, flags = _folder_arguments("trim", arguments, **{"--to-gb": gigabytes})
    limit = flags.get("to_gb")
    if limit is None or not 0 <= limit < 1e6:
        raise ConfigError("--to-gb is needed: the gigabytes to keep, 0 or more")
    with _reading_folder(folder):
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}")
        freed = trim_folder(folder, int(limit * 1e9))
    print(json.dumps({"freed_bytes": freed}) if "json" in flags else f"freed {format_bytes(freed)}")
    return 0


CACHE_ACTIONS = {
    "show": "show how much is cached, under which salts, and how much of it was reused",
    "explain": "explain what a request would reuse if it came now, and why not more",
    "clear": "remove all cached prefixes of this API key",
    "export": "write all cached prefixes of this API key to a file",
    "import": "cache the prefixes of a file from this server, or one with the same archive key",
    **FOLDER_ACTIONS,
}


def run_cache(arguments: list[str]) -> int:
    action = choose_action("cache", CACHE_ACTIONS, arguments)
    return 0 if action is None else _CACHE_COMMANDS[action](arguments[1:])


def _cache_parser(action: str) -> CommandParser:
    parser = CommandParser(f"cache {action}", f"For a running server: {CACHE_ACTIONS[action]}.")
    parser.flag("--url", metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    parser.flag("--json", action="store_true", help="print the server's answer as it is")
    add_settings(parser, ("the rest",))
    return parser


def _server_client(
    parser: CommandParser, arguments: list[str], *, administering: bool = False
) -> tuple[ServerClient, dict[str, Any]]:
    """A client and the flags. `administering` prefers the administrator's key."""
    namespace = parser.parse(arguments)
    settings = settings_from_arguments(namespace).settings
    flags = vars(namespace)
    keys = [settings.api_key, settings.admin_api_key]
    if administering and "api_key" not in flags:
        keys.reverse()
    key = next((key for key in keys if key is not None), None)
    return ServerClient(flags.get("url", DEFAULT_URL), key), flags


def _print_answer(answer: Any, flags: dict[str, Any], format_answer: Callable[[Any], str]) -> int:
    print(json.dumps(answer, indent=2, ensure_ascii=False) if "json" in flags else format_answer(answer))
    return 0


def _show_cache(arguments: list[str]) -> int:
    client, flags = _server_client(_cache_parser("show"), arguments)
    return _print_answer(client.get("cache"), flags, format_cache_status)


def _clear_cache(arguments: list[str]) -> int:
    client, flags = _server_client(_cache_parser("clear"), arguments)
    return _print_answer(client.delete("cache"), flags, lambda answer: f"freed {format_bytes(answer['freed_bytes'])}")


def _explain_cache(arguments: list[str]) -> int:
    parser = _cache_parser("explain")
    parser.add_argument("file", metavar="FILE", help="the body of the request as JSON; - reads standard input")
    client, flags = _server_client(parser, arguments)
    return _print_answer(client.post("cache/explain", _read_body(flags["file"])), flags, format_explanation)


def _export_cache(arguments: list[str]) -> int:
    parser = _cache_parser("export")
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.flag("--force", action="store_true", help="overwrite an existing file")
    client, flags = _server_client(parser, arguments)
    path = Path(flags["file"])
    if path.exists() and "force" not in flags:
        raise ConfigError(f"{path} exists; --force overwrites it")
    try:
        _download_export(client, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    answer = {"file": str(path), "bytes": path.stat().st_size}
    return _print_answer(answer, flags, lambda answer: f"wrote {format_bytes(answer['bytes'])}")


def _download_export(client: ServerClient, path: Path) -> None:
    """Under another name until it is complete, so that no partial file replaces one."""
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
    client, flags = _server_client(parser, arguments, administering=True)
    try:
        file = Path(flags["file"]).open("rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"cannot read {flags['file']}: {error.strerror}") from error
    with file:
        answer = client.upload("cache/import", file)
    return _print_answer(answer, flags, lambda answer: f"cached {counted(answer['added_tokens'], 'new token')}")


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
        raise ConfigError(f"{name} is not a request: that is an object with 'messages', 'prompt' or 'input'")
    return body


def format_cache_status(answer: Any) -> str:
    used, limit = format_bytes(answer["used_bytes"]), format_bytes(answer["limit_bytes"])
    rate = answer["matched_tokens"] / answer["prompt_tokens"] if answer["prompt_tokens"] else 0.0
    lines = [
        f"{used} of {limit} used; {counted(answer['evictions'], 'record')} evicted so far",
        f"{answer['hits']} of {counted(answer['prompts'], 'prompt')} reused a prefix: {answer['matched_tokens']} of "
        f"{counted(answer['prompt_tokens'], 'token')} ({rate:.0%})",
    ]
    codecs = [("prefixes cached as", "codec"), ("running sequences as", "live_codec")]
    lines += [f"{what} {answer[name]}" for what, name in codecs if answer.get(name, "raw") != "raw"]
    if disk := answer.get("disk"):
        lines.append(f"on disk: {format_bytes(disk['used_bytes'])} in {counted(disk['records'], 'record')}")
    if totals := answer.get("totals"):
        lines.append(
            f"{counted(totals['tenants'], 'key')} in all: {format_bytes(totals['used_bytes'])}; "
            f"{counted(totals['evictions'], 'record')} evicted so far"
        )
        lines += _format_disk_totals(totals.get("disk"))
    for salt in answer["salts"]:
        name = f"salt {salt['salt']!r}" if salt["salt"] else "no salt"
        pinned = f", {salt['pinned_tokens']} of them pinned" if salt["pinned_tokens"] else ""
        points = f", {counted(salt['checkpoints'], 'checkpoint')}" if salt["checkpoints"] else ""
        lines.append(
            f"{name}: {counted(salt['tokens'], 'token')}{pinned} in {counted(salt['records'], 'record')}{points}, "
            f"{format_bytes(salt['bytes'])}"
        )
    return "\n".join(lines)


def _format_disk_totals(disk: Any) -> list[str]:
    if not disk:
        return []
    failed = disk["spill_failures"] + disk["promotion_failures"]
    return [
        f"all keys on disk: {format_bytes(disk['used_bytes'])} in {counted(disk['records'], 'record')} of this model; "
        f"all files in the folder take {format_bytes(disk['folder_bytes'])} of {format_bytes(disk['limit_bytes'])}",
        f"  written: {counted(disk['spills'], 'record')}, {format_bytes(disk['spilled_bytes'])} in "
        f"{disk['spill_s']:.1f} s; {disk['dropped']} dropped because the queue was full",
        f"  read: {counted(disk['promotions'], 'record')}, {format_bytes(disk['promoted_bytes'])} in "
        f"{disk['promotion_s']:.1f} s; {counted(disk['hits'], 'prompt')} hit, {disk['misses']} missed, "
        f"{counted(failed, 'record')} failed",
    ]


def format_explanation(answer: Any) -> str:
    cache = answer["cache"]
    source = " from disk" if cache.get("tier") == "disk" else ""
    matched, whole = cache["matched_tokens"], answer["prompt_tokens"]
    lines = [f"{matched} of {counted(whole, 'token')} would be reused{source}: {cache['reason']}"]
    prompts = cache.get("prompts") or [cache]
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            lines.append(f"prompt {number}: {counted(prompt['matched_tokens'], 'token')}: {prompt['reason']}")
        if prompt["diverged"] is not None:
            lines += _format_divergence(prompt["diverged"])
    return "\n".join(lines)


def _format_divergence(point: Any) -> list[str]:
    where = "the prompt" if point["message"] is None else f"message {point['message']} ({point['role']})"
    return [
        f"they diverge in {where}, at character {point['character']}:",
        f"  request: {point['ours']!r}",
        f"  cached:  {point['theirs']!r}",
    ]
