"""`ingot bench speculate`: what guessing ahead gains on several kinds of work, and whether texts stay the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.cli.bench_flag_values import URL, number, require_folder, timeout
from ingot.cli.bench_report import write_json
from ingot.cli.bench_speculation import PLAIN, GuessingPlan, Outcome, measure, proposers_of
from ingot.cli.bench_workloads import WORKLOADS
from ingot.cli.client import Client
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.config import FOREIGN, SETTINGS, Settings
from ingot.errors import ConfigError, nearest
from ingot.version import __version__

ABOUT = (
    "Measure what guessing ahead gains: plain decoding against each proposer that the server offers, on the same "
    "questions, in turns. Texts are compared, too: they must be the same."
)
LOCAL_SECTIONS = ("the model", "the engine")
HEAD = f"{'workload':<18} {'proposer':<9} {'tok/s':>8} {'ratio':>7} {'accepted':>9} {'tok/pass':>9} {'same text':>10}"


def run(arguments: list[str]) -> int:
    namespace = _parser().parse(arguments)
    given = vars(namespace)
    settings = settle(namespace).settings
    plan = read_plan(given)
    if "json" in given:
        require_folder(given["json"])
    with contextlib.ExitStack() as stack:
        client = _client(given, settings, stack)
        proposers = proposers_of(client)
        print(f"{client.url}: {', '.join(proposers)} against plain decoding, {plan.rounds} rounds of {plan.streams}")
        print(HEAD)
        outcomes = []
        for outcome in measure(client, plan, proposers):
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
    if "json" in given:
        made = {"ingot": __version__, "plan": asdict(plan), "outcomes": [asdict(each) for each in outcomes]}
        write_json(given["json"], made)
    return _complain(outcomes)


def _parser() -> CommandParser:
    parser = CommandParser("bench speculate", ABOUT)
    usual = GuessingPlan()
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model to serve here, instead of a running server")
    parser.flag("--url", metavar="URL", help=f"the running server (default: {URL})")
    parser.flag("--workloads", metavar="A,B", help=f"some of: {', '.join(WORKLOADS)} (default: all)")
    parser.flag("--rounds", metavar="N", help=f"rounds of each workload (default: {usual.rounds})")
    parser.flag("--streams", metavar="N", help=f"questions at once (default: {usual.streams})")
    parser.flag("--output-tokens", metavar="N", help=f"longest answer (default: {usual.output_tokens})")
    parser.flag("--seed", metavar="N", help=f"seed of the questions (default: {usual.seed})")
    parser.flag("--timeout", metavar="N", help="seconds of silence after which a request fails (default: 600)")
    parser.flag("--json", metavar="FILE", type=Path, help="write all figures here")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    foreign = {known.section for known in FOREIGN.values()}
    add_settings(parser, (*LOCAL_SECTIONS, *foreign, "the rest"))
    return parser


def read_plan(given: Mapping[str, Any]) -> GuessingPlan:
    """The plan that the flags describe. Raises ConfigError."""
    usual = GuessingPlan()
    named = given["workloads"].split(",") if "workloads" in given else usual.workloads
    return GuessingPlan(
        workloads=tuple(dict.fromkeys(_workload(name.strip()) for name in named)),
        rounds=number(given, "rounds", usual.rounds, low=1),
        streams=number(given, "streams", usual.streams, low=1, high=256),
        output_tokens=number(given, "output_tokens", usual.output_tokens, low=2),
        seed=number(given, "seed", usual.seed, low=0),
    )


def _workload(name: str) -> str:
    if name in WORKLOADS:
        return name
    near = nearest(name, WORKLOADS)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(f"--workloads: {name[:100]!r} is not one of {', '.join(WORKLOADS)}{hint}")


def _client(given: Mapping[str, Any], settings: Settings, stack: contextlib.ExitStack) -> Client:
    """A client of the running server, or of one that is started here and lives as long as `stack`."""
    if given.get("model") is not None:
        if "url" in given:
            raise ConfigError("--url names a running server and MODEL one to start: give one of them")
        from ingot.cli.local_server import local_server

        return Client(stack.enter_context(local_server(settings)), settings.api_key, timeout=timeout(given))
    known = {**SETTINGS, **FOREIGN}
    for name in given:
        if name != "model" and name in known and known[name].section not in ("the rest", "the door"):
            raise ConfigError(f"{known[name].flag} says how to run a model here: it needs a MODEL")
    return Client(given.get("url", URL), settings.api_key, timeout=timeout(given))


def _row(outcome: Outcome) -> str:
    return (
        f"{outcome.workload:<18} {'plain' if outcome.proposer == PLAIN else outcome.proposer:<9} "
        f"{_figure(outcome.speed, '.1f'):>8} {_figure(outcome.ratio, '.2f'):>7} "
        f"{_figure(outcome.acceptance, '.0%'):>9} {_figure(outcome.tokens_per_pass, '.2f'):>9} "
        f"{f'{outcome.same}/{outcome.answers}':>10}"
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _complain(outcomes: Sequence[Outcome]) -> int:
    """Texts that differ make a failed benchmark."""
    wrong = [each for each in outcomes if each.same < each.answers]
    for each in wrong:
        differ = f"{each.answers - each.same} of {each.answers} texts differ from plain decoding"
        print(f"ingot bench: {each.workload}, {each.proposer}: {differ}", file=sys.stderr)
    return 1 if wrong else 0
