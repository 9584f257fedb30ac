"""`ingot cache ACTION`: what a running server keeps of earlier prompts, what a request would find of it, and the folder
that prefixes are kept in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.cli import cache_folder
from ingot.cli.client import Client
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.errors import ConfigError, nearest

URL = "http://127.0.0.1:8000"
ACTIONS = {
    "show": "how much is kept, under which salts, and what it was good for",
    "explain": "what a request would take over if it came now, and why no more",
    "clear": "forget all that is kept of this key's prompts",
    "export": "write all that is kept of this key's prompts to a file",
    "import": "keep what is in a file that this server, or one that shares its archive key, wrote",
    **cache_folder.ACTIONS,
}


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    action = arguments[0]
    if action not in ACTIONS:
        near = nearest(action, ACTIONS)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(ACTIONS)}"
        raise ConfigError(f"unknown action {action}; {hint}")
    return _RUNS[action](arguments[1:])


def _usage() -> str:
    rows = "\n".join(f"  {name:<8} {about}" for name, about in ACTIONS.items())
    return f"usage: ingot cache ACTION [FLAGS]\n\n{rows}\n\n`ingot cache ACTION --help` lists an action's flags."


def _parser(action: str) -> CommandParser:
    parser = CommandParser(f"cache {action}", f"Of a running server: {ACTIONS[action]}.")
    parser.flag("--url", metavar="URL", help=f"the server (default: {URL})")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    parser.flag("--json", action="store_true", help="print the server's answer as it is")
    add_settings(parser, ("the rest",))
    return parser


def _begun(
    parser: CommandParser, arguments: list[str], *, administering: bool = False
) -> tuple[Client, dict[str, Any]]:
    """A client and what was given. The administrator's key is for what only the administrator may."""
    namespace = parser.parse(arguments)
    settings = settle(namespace).settings
    given = vars(namespace)
    known = [settings.api_key, settings.admin_api_key]
    keys = known[::-1] if administering and "api_key" not in given else known
    return Client(given.get("url", URL), next((key for key in keys if key is not None), None)), given


def _tell(answer: Any, given: dict[str, Any], told: Callable[[Any], str]) -> int:
    print(json.dumps(answer, indent=2, ensure_ascii=False) if "json" in given else told(answer))
    return 0


def _show(arguments: list[str]) -> int:
    client, given = _begun(_parser("show"), arguments)
    return _tell(client.get("cache"), given, shown)


def _clear(arguments: list[str]) -> int:
    client, given = _begun(_parser("clear"), arguments)
    return _tell(client.delete("cache"), given, lambda answer: f"freed {_bytes(answer['freed_bytes'])}")


def _explain(arguments: list[str]) -> int:
    parser = _parser("explain")
    parser.add_argument(
        "file", metavar="FILE", help="the request's body, JSON as it would be sent; - reads it from here"
    )
    client, given = _begun(parser, arguments)
    return _tell(client.post("cache/explain", _body(given["file"])), given, explained)


def _export(arguments: list[str]) -> int:
    parser = _parser("export")
    parser.add_argument("file", metavar="FILE", help="where to")
    parser.flag("--force", action="store_true", help="write over a file that is there")
    client, given = _begun(parser, arguments)
    path = Path(given["file"])
    if path.exists() and "force" not in given:
        raise ConfigError(f"{path} is there already; --force writes over it")
    try:
        _fetch(client, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return _tell(
        {"file": str(path), "bytes": path.stat().st_size}, given, lambda told: f"wrote {_bytes(told['bytes'])}"
    )


def _fetch(client: Client, path: Path) -> None:
    """Under another name until all of it is there: half a file is worse than none, and than the one before."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            client.download("cache/export", file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _import(arguments: list[str]) -> int:
    parser = _parser("import")
    parser.add_argument("file", metavar="FILE", help="a file that `ingot cache export` wrote")
    client, given = _begun(parser, arguments, administering=True)
    try:
        file = Path(given["file"]).open("rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"cannot read {given['file']}: {error.strerror}") from error
    with file:
        answer = client.upload("cache/import", file)
    return _tell(answer, given, lambda told: f"{told['added_tokens']} tokens are kept that were not before")


_RUNS = {
    "show": _show,
    "explain": _explain,
    "clear": _clear,
    "export": _export,
    "import": _import,
    "list": cache_folder.listed,
    "verify": cache_folder.verify,
    "trim": cache_folder.trimmed,
}


def _body(name: str) -> dict[str, Any]:
    try:
        body = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{name} holds no request: that is an object with 'messages', 'prompt' or 'input'")
    return body


def shown(answer: Any) -> str:
    """The state of the cache, in words."""
    used, limit = _bytes(answer["used_bytes"]), _bytes(answer["limit_bytes"])
    taken = answer["matched_tokens"] / answer["prompt_tokens"] if answer["prompt_tokens"] else 0.0
    lines = [
        f"{used} of {limit} are used; {answer['evictions']} pieces had to go so far",
        f"{answer['hits']} of {answer['prompts']} prompts found something: {answer['matched_tokens']} of "
        f"{answer['prompt_tokens']} tokens ({taken:.0%}) did not have to be computed",
    ]
    codecs = [("kept in", "codec"), ("running sequences in", "live_codec")]
    lines += [f"{what} {answer[name]}" for what, name in codecs if answer.get(name, "raw") != "raw"]
    if disk := answer.get("disk"):
        lines.append(f"on disk: {_bytes(disk['used_bytes'])} in {disk['records']} records")
    if totals := answer.get("totals"):
        lines.append(
            f"all keys together: {_bytes(totals['used_bytes'])} of {totals['tenants']} keys; {totals['evictions']} "
            "pieces had to go so far"
        )
        lines += _disk_totals(totals.get("disk"))
    for salt in answer["salts"]:
        name = f"salt {salt['salt']!r}" if salt["salt"] else "no salt"
        pinned = f", {salt['pinned_tokens']} of them pinned" if salt["pinned_tokens"] else ""
        points = f", {salt['checkpoints']} checkpoints" if salt["checkpoints"] else ""
        lines.append(
            f"{name}: {salt['tokens']} tokens{pinned} in {salt['records']} records{points}, {_bytes(salt['bytes'])}"
        )
    return "\n".join(lines)


def _disk_totals(disk: Any) -> list[str]:
    if not disk:
        return []
    failed = disk["spill_failures"] + disk["promotion_failures"]
    return [
        f"all keys together on disk: {_bytes(disk['used_bytes'])} in {disk['records']} records of this model; all "
        f"files in the folder take {_bytes(disk['folder_bytes'])} of {_bytes(disk['limit_bytes'])}",
        f"  written: {disk['spills']} records, {_bytes(disk['spilled_bytes'])} in {disk['spill_s']:.1f} s; "
        f"{disk['dropped']} were not, as too many waited",
        f"  read: {disk['promotions']} records, {_bytes(disk['promoted_bytes'])} in {disk['promotion_s']:.1f} s, for "
        f"{disk['hits']} prompts; {disk['misses']} found nothing there; {failed} records failed",
    ]


def explained(answer: Any) -> str:
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
            lines += _parted(prompt["diverged"])
    return "\n".join(lines)


def _parted(place: Any) -> list[str]:
    where = "the prompt" if place["message"] is None else f"message {place['message']} ({place['role']})"
    return [
        f"they part in {where}, at character {place['character']}:",
        f"  this request: {place['ours']!r}",
        f"  what is kept: {place['theirs']!r}",
    ]


def _bytes(count: int) -> str:
    from ingot.models.files.progress import format_bytes

    return format_bytes(count)
