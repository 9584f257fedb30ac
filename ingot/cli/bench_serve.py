"""`ingot bench serve`: measure a running OpenAI-compatible server under several loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.cli import bench_report
from ingot.cli.bench import PATHS, REQUESTS_PER_STREAM, LoadPlan, prepare, run_level
from ingot.cli.bench_flag_values import URL, number, require_folder, timeout, whole
from ingot.cli.bench_stats import Level
from ingot.cli.client import Client
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.errors import ConfigError

ABOUT = (
    "Measure a running OpenAI-compatible server: time to first token (TTFT), time between tokens (ITL) and "
    "throughput, at several numbers of concurrent streams."
)


def run(arguments: list[str]) -> int:
    namespace = _parser().parse(arguments)
    settings = settle(namespace).settings
    given = vars(namespace)
    plan = read_plan(given)
    json_to, plot_to = given.get("json"), given.get("plot")
    for path in filter(None, (json_to, plot_to)):
        require_folder(path)
    if plot_to:
        bench_report.require_plot(plot_to)

    client = Client(given.get("url", URL), settings.api_key, timeout=timeout(given))
    target = prepare(client, plan)
    print(f"{target.model} at {client.url}: about {plan.prompt_tokens} tokens in, {plan.output_tokens} out")
    print(bench_report.table_head())
    levels: list[Level] = []
    for concurrency in plan.concurrency:
        levels.append(run_level(target, plan, concurrency))
        print(bench_report.table_row(levels[-1]), flush=True)
    if json_to:
        bench_report.write_json(json_to, bench_report.as_json(target, plan, levels))
    if plot_to:
        bench_report.write_plot(plot_to, target, plan, levels)
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
        concurrency=tuple(whole("--concurrency", part, 1, 4096) for part in levels),
        prompt_tokens=number(given, "prompt_tokens", usual.prompt_tokens, low=1),
        output_tokens=number(given, "output_tokens", usual.output_tokens, low=1),
        requests=number(given, "requests", 0, low=1) or None,
        warmup=number(given, "warmup", usual.warmup, low=0),
        seed=number(given, "seed", usual.seed, low=0),
    )


def _complain(levels: list[Level]) -> int:
    """Failed requests make a failed benchmark, each kind of failure named once."""
    for level in levels:
        for message, times in level.errors.items():
            print(f"ingot bench: {level.concurrency} streams: {times}x {message}", file=sys.stderr)
    return 1 if any(level.errors for level in levels) else 0
