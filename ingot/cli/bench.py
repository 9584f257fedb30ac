"""`ingot bench serve`: measure a running OpenAI-compatible server under several loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.cli import bench_report as report
from ingot.cli.bench_load import PATHS, REQUESTS_PER_STREAM, LoadPlan, prepare, run_level
from ingot.cli.bench_stats import Level
from ingot.cli.client import Client
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.errors import ConfigError, nearest

ABOUT = (
    "Measure a running OpenAI-compatible server: time to first token (TTFT), time between tokens (ITL) and "
    "throughput, at several numbers of concurrent streams."
)
SUBJECTS = ("serve",)
URL = "http://127.0.0.1:8000"
MOST = 1 << 20  # of anything that is counted here
USAGE = "usage: ingot bench serve [FLAGS]\n\n  serve    measure a running server (ingot bench serve --help)"


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] not in SUBJECTS:
        near = nearest(arguments[0], SUBJECTS)
        raise ConfigError(f"unknown subject {arguments[0]}; " + (f"did you mean {near}?" if near else "try: serve"))
    return _serve(arguments[1:])


def _serve(arguments: list[str]) -> int:
    namespace = _parser().parse(arguments)
    settings = settle(namespace).settings
    given = vars(namespace)
    plan = read_plan(given)
    json_to, plot_to = given.get("json"), given.get("plot")
    for path in filter(None, (json_to, plot_to)):
        _require_folder(path)
    if plot_to:
        report.require_plot(plot_to)

    client = Client(given.get("url", URL), settings.api_key, timeout=_timeout(given))
    target = prepare(client, plan)
    print(f"{target.model} at {client.url}: about {plan.prompt_tokens} tokens in, {plan.output_tokens} out")
    print(report.table_head())
    levels: list[Level] = []
    for concurrency in plan.concurrency:
        levels.append(run_level(target, plan, concurrency))
        print(report.table_row(levels[-1]), flush=True)
    if json_to:
        report.write_json(json_to, report.as_json(target, plan, levels))
    if plot_to:
        report.write_plot(plot_to, target, plan, levels)
    return _complain(levels)


def _parser() -> CommandParser:
    parser = CommandParser("bench serve", ABOUT)
    usual = LoadPlan()
    levels = ",".join(map(str, usual.concurrency))
    parser.flag("--url", metavar="URL", help=f"the server (default: {URL})")
    parser.flag("--model", metavar="NAME", dest="name", help="the model to ask for (default: what the server lists)")
    parser.flag("--endpoint", metavar="NAME", help=f"{' or '.join(PATHS)} (default: {usual.endpoint})")
    parser.flag("--concurrency", metavar="N,N", help=f"numbers of streams at once (default: {levels})")
    parser.flag("--prompt-tokens", metavar="N", help=f"prompt length (default: {usual.prompt_tokens})")
    parser.flag("--output-tokens", metavar="N", help=f"answer length (default: {usual.output_tokens})")
    parser.flag("--requests", metavar="N", help=f"requests a level (default: {REQUESTS_PER_STREAM} a stream)")
    parser.flag("--warmup", metavar="N", help=f"requests before each level (default: {usual.warmup})")
    parser.flag("--seed", metavar="N", help=f"seed of the prompts (default: {usual.seed})")
    parser.flag("--timeout", metavar="N", help="seconds of silence after which a request fails (default: 600)")
    parser.flag("--json", metavar="FILE", type=Path, help="write all figures here")
    parser.flag("--plot", metavar="FILE", type=Path, help="draw them here (.png, .svg or .pdf)")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    add_settings(parser, ("the rest",))
    return parser


def read_plan(given: Mapping[str, Any]) -> LoadPlan:
    """The plan that the flags describe. Raises ConfigError."""
    usual = LoadPlan()
    endpoint = given.get("endpoint", usual.endpoint)
    if endpoint not in PATHS:
        raise ConfigError(f"--endpoint: {endpoint!r} is not one of {', '.join(PATHS)}")
    levels = given["concurrency"].split(",") if "concurrency" in given else usual.concurrency
    return LoadPlan(
        endpoint=endpoint,
        model=given.get("name"),
        concurrency=tuple(_whole("--concurrency", part, 1, 4096) for part in levels),
        prompt_tokens=_number(given, "prompt_tokens", usual.prompt_tokens, low=1),
        output_tokens=_number(given, "output_tokens", usual.output_tokens, low=1),
        requests=_number(given, "requests", 0, low=1) or None,
        warmup=_number(given, "warmup", usual.warmup, low=0),
        seed=_number(given, "seed", usual.seed, low=0),
    )


def _number(given: Mapping[str, Any], name: str, usual: int, low: int) -> int:
    flag = "--" + name.replace("_", "-")
    return _whole(flag, given[name], low, MOST) if name in given else usual


def _whole(flag: str, text: str | int, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {value} is not between {low} and {high}")
    return value


def _timeout(given: Mapping[str, Any]) -> float:
    return float(_number(given, "timeout", 600, low=1))


def _require_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")


def _complain(levels: list[Level]) -> int:
    """Failed requests make a failed benchmark, each kind of failure named once."""
    for level in levels:
        for message, times in level.errors.items():
            print(f"ingot bench: {level.concurrency} streams: {times}x {message}", file=sys.stderr)
    return 1 if any(level.errors for level in levels) else 0
