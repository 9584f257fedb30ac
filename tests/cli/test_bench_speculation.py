"""`ingot bench speculate`: the same questions by everybody in turns, true figures, and texts that must be the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.bench_speculation import (
    PLAIN_DECODING,
    WORKLOADS,
    MeasuredAnswer,
    SpeculationPlan,
    measure_proposers,
    offered_proposers,
    read_measured_answer,
    read_speculation_plan,
    summarise_outcome,
    workload_body,
)
from ingot.cli.client import ServerClient, ServerError
from ingot.engine.request import (
    Ended,
    Event,
    Request,
    SequenceEnded,
    SpeculationReport,
    TextDelta,
    Timing,
    Usage,
)
from ingot.engine.speculation.lookup import LookupProposer, PastAnswers
from ingot.errors import ConfigError, Overloaded
from tests import scripted
from tests.cli.scripted import Script, environment, scripted_server
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings
from tests.processes import INGOT, run

OFFERED = ("lookup", "mtp")
SECONDS = {(): 2.0, ("lookup",): 1.0, ("mtp",): 4.0, None: 0.5}
TEXT_ONLY = ("code edit", "copy", "chat")


def said(request: Request, text: str = "the same") -> list[list[Event]]:
    """Eleven tokens, in a time that depends on the proposer. Half of the draft tokens are right."""
    drafts = SpeculationReport(8, 4, 6) if request.speculate != () else SpeculationReport(passes=10)
    ended = Ended(Usage(20, 11), Timing(0.0, 0.1, SECONDS[request.speculate]), (), drafts)
    return [[TextDelta(0, text), SequenceEnded(0, "stop", None, 11), ended]]


def wrong_with_mtp(request: Request) -> list[list[Event]]:
    return said(request, "another" if request.speculate == ("mtp",) else "the same")


@contextmanager
def server(script: Callable[[Request], Any] = said) -> Iterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(script, proposers=OFFERED)
    with running(engine, settings()) as url:
        yield url, engine


def bench(url: str, home: Path, *flags: str, by: Callable[..., Any] = run) -> subprocess.CompletedProcess[str]:
    command = [INGOT, "bench", "speculate", *(["--url", url] if url else []), *flags]
    done: subprocess.CompletedProcess[str]
    done = by(command, capture_output=True, text=True, timeout=100, env=environment(home), cwd=home)
    return done


def test_each_proposer_and_all_together_are_set_against_plain_decoding() -> None:
    plan = SpeculationPlan(workloads=("copy",), rounds=2, streams=2)
    with server() as (url, engine):
        found = {
            one.proposer: one
            for one in measure_proposers(ServerClient(url), plan, offered_proposers(ServerClient(url)))
        }
    assert list(found) == [PLAIN_DECODING, "lookup", "mtp", "auto"]
    assert {name: one.ratio for name, one in found.items()} == {
        PLAIN_DECODING: 1.0,
        "lookup": 2.0,
        "mtp": 0.5,
        "auto": 4.0,
    }
    assert (found[PLAIN_DECODING].speed, found[PLAIN_DECODING].acceptance, found[PLAIN_DECODING].tokens_per_pass) == (
        5.0,
        None,
        None,
    )
    assert (found["mtp"].acceptance, found["mtp"].tokens_per_pass) == (0.5, pytest.approx(1 + 4 / 6))
    assert all(one.same == one.answers == 4 for one in found.values())
    assert {request.sampling.temperature for request in engine.requests} == {0.0}


def test_everybody_is_asked_the_same_in_turns_and_shares_nothing() -> None:
    plan = SpeculationPlan(workloads=("chat",), rounds=3)
    with server() as (url, engine):
        list(measure_proposers(ServerClient(url), plan, OFFERED))
    turns = [engine.requests[first : first + 3] for first in range(0, 12, 3)]
    assert [turn[0].speculate for turn in turns[1:]] == [(), ("lookup",), ("mtp",)]
    assert all(len({request.prompts for request in turn}) == 1 for turn in turns)
    assert len({turn[0].prompts for turn in turns}) == 4
    assert not any(request.cache for request in engine.requests)


def test_a_second_run_on_the_same_server_proposes_nothing_that_the_first_was_answered() -> None:
    plan, past = SpeculationPlan(workloads=("chat",), rounds=1), PastAnswers()
    # No two of these letters follow each other twice, nor in a prompt.
    letters = "".join(chr(ord("a") + number) + chr(ord("Z") - number) for number in range(26))
    engine = scripted.start(scripted.said(otherwise=letters), proposers=[LookupProposer(past)])
    try:
        with running(engine, settings()) as url:
            runs = [list(measure_proposers(ServerClient(url), plan, ("lookup",))) for _ in range(2)]
    finally:
        engine.close()
    assert past.count == 0
    assert [found.same for found in (*runs[0], *runs[1])] == [1] * 4
    assert not any(run[1].acceptance for run in runs)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    with server() as (url, _):
        flags = ("--workloads", ",".join(TEXT_ONLY), "--rounds", "1", "--json", "x.json")
        done = bench(url, tmp_path, *flags, by=subprocess.run)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line[19:].split() for line in done.stdout.splitlines()[2:]]
    assert rows[1] == ["lookup", "10.0", "2.00", "50%", "1.67", "1/1"]
    assert len(rows) == 3 * 4
    written = json.loads((tmp_path / "x.json").read_text())
    assert [one["ratio"] for one in written["outcomes"][:4]] == [1.0, 2.0, 0.5, 4.0]


def test_a_text_that_differs_fails_the_command_and_is_named(tmp_path: Path) -> None:
    with server(wrong_with_mtp) as (url, _):
        done = bench(url, tmp_path, "--workloads", "copy", "--rounds", "2")
    assert done.returncode == 1
    assert done.stderr == "ingot bench: copy, mtp: 2 of 2 texts differ from plain decoding\n"


def test_a_question_that_is_refused_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    with server() as (url, engine):
        engine.refusal = Overloaded("full", retry_after=1)
        done = bench(url, tmp_path, "--streams", "3")
    assert done.returncode == 1 and done.stderr == "ingot bench: full (HTTP 429)\n"


def test_a_server_without_proposers_is_refused(tmp_path: Path) -> None:
    with running(ScriptedEngine(), settings()) as url:
        done = bench(url, tmp_path)
    assert done.returncode == 1 and "start it with --speculate" in done.stderr
    with scripted_server(Script()) as other, pytest.raises(ServerError, match="no ingot"):
        offered_proposers(ServerClient(other.url))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--workloads", "copyy"), "did you mean copy?"),
        (("--rounds", "0"), "--rounds: 0 is not between 1"),
        (("--draft-model", "x"), "--draft-model configures a model that is served here: it needs a MODEL"),
        (("--memory", "50%"), "--memory configures a model that is served here"),
        (("smollm2-135m", "--url", "http://127.0.0.1:1"), "give one of them"),
        (("--json", "no/such/x.json"), "there is no folder"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    done = bench("", tmp_path, *flags)
    assert done.returncode == 2 and says in done.stderr


def test_the_plan_is_read_from_the_flags() -> None:
    assert read_speculation_plan({}) == SpeculationPlan()
    given = {"workloads": "chat, copy", "rounds": "2", "streams": "4", "output_tokens": "9", "seed": "1"}
    assert read_speculation_plan(given) == SpeculationPlan(("chat", "copy"), 2, 4, 9, 1)
    with pytest.raises(ConfigError):
        read_speculation_plan({"streams": "1000"})


@pytest.mark.parametrize("workload", WORKLOADS)
def test_questions_repeat_by_their_number_and_differ_otherwise(workload: str) -> None:
    assert workload_body(workload, "1") == workload_body(workload, "1")
    assert len({json.dumps(workload_body(workload, str(number))) for number in range(8)}) > 4


def test_every_workload_is_answered_by_a_real_server() -> None:
    order = {"customer": "Ivo", "city": "Riga", "article": "tiles", "quantity": 3, "paid": True}
    trip = {"traveller": "Liv", "departure_city": "Riga", "destination_city": "Porto", "passengers": 2}
    script = scripted.said(
        ("Write these orders", json.dumps({"orders": [order] * 3})),
        ("Book a flight", scripted.call("book_flight", **trip, travel_class="economy")),
        otherwise="Here it is.",
    )
    engine = scripted.start(script)
    try:
        with running(engine, settings()) as url:
            for workload in WORKLOADS:
                body = workload_body(workload, "0") | {"temperature": 0, "max_tokens": 600, "speculate": PLAIN_DECODING}
                answered = read_measured_answer(ServerClient(url).post("chat/completions", body))
                assert answered.speed is not None and answered.proposed == 0
                assert ("Riga" in answered.text) == (workload in ("structured output", "tool calls"))
    finally:
        engine.close()


def test_calls_are_part_of_the_text_and_their_ids_are_not() -> None:
    def answer(id: str, city: str) -> Any:
        call = {"id": id, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        message = {"content": None, "tool_calls": [call]}
        usage, receipt = {"completion_tokens": 5}, {"timing": {"decode_s": 1.0}}
        return {"choices": [{"message": message}], "usage": usage, "ingot": receipt}

    assert (
        read_measured_answer(answer("a", "Rome"))
        == read_measured_answer(answer("b", "Rome"))
        != read_measured_answer(answer("a", "Oslo"))
    )
    with pytest.raises(ServerError):
        read_measured_answer({"choices": []})


def test_answers_too_short_to_time_have_no_speed_and_no_ratio() -> None:
    short = MeasuredAnswer("x", 1, 0.0)
    made = summarise_outcome("chat", "mtp", [{PLAIN_DECODING: [short], "mtp": [short]}])
    assert (made.speed, made.ratio, made.same) == (None, None, 1)
