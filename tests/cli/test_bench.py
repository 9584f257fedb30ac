from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.bench import WORDS, LoadPlan, calibrate, measure, prepare, run_level
from ingot.cli.bench_serve import read_plan
from ingot.cli.client import Client
from ingot.errors import ConfigError
from tests.cli.scripted import INGOT, Answer, Script, environment, scripted_server

OVERHEAD = 9


def text_of(body: Mapping[str, Any]) -> str:
    text: str = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return text


def counting(body: Mapping[str, Any]) -> Answer:
    """A server whose tokenizer takes two tokens a word, and whose template takes nine."""
    tokens = 2 * len(text_of(body).split()) + OVERHEAD
    return Answer(pieces=tuple("abcdefgh"[: body["max_tokens"]]), prompt_tokens=tokens)


def bench(script: Script, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [INGOT, "bench", "serve", "--url", script.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(home), cwd=home)


def measured(script: Script) -> list[dict[str, Any]]:
    return [body for body in script.bodies if body.get("stream")]


def test_prompts_have_the_wanted_length_by_the_servers_own_count() -> None:
    with scripted_server(Script(answer=counting)) as script:
        plan = LoadPlan(prompt_tokens=101, output_tokens=4, concurrency=(2,), requests=3, warmup=0)
        level = run_level(prepare(Client(script.url), plan), plan, 2)
    assert level.prompt_tokens == 3 * 101
    assert level.output_tokens == level.chunks == 3 * 4


def test_no_two_prompts_share_their_first_words_and_a_seed_repeats_them() -> None:
    def prompts(seed: int) -> list[str]:
        with scripted_server(Script(answer=counting)) as script:
            plan = LoadPlan(prompt_tokens=201, requests=6, warmup=2, seed=seed)
            run_level(prepare(Client(script.url), plan), plan, 1)
        return [text_of(body) for body in measured(script)]

    first = prompts(seed=1)
    assert len({tuple(prompt.split()[:4]) for prompt in first}) == 8
    assert prompts(seed=1) == first
    assert not set(prompts(seed=2)) & set(first)


def test_so_many_streams_run_at_once_and_no_more() -> None:
    with scripted_server(Script(answer=counting, gathers=3)) as script:
        plan = LoadPlan(prompt_tokens=51, requests=7, warmup=0)
        level = run_level(prepare(Client(script.url), plan), plan, 3)
    assert level.failed == 0
    assert script.most_at_once == 3


def test_ingot_is_asked_to_go_on_to_the_wanted_length_and_others_are_not() -> None:
    for owner, asked in (("ingot", True), ("someone", None)):
        with scripted_server(Script(answer=counting, owned_by=owner)) as script:
            plan = LoadPlan(prompt_tokens=51, requests=1)
            run_level(prepare(Client(script.url), plan), plan, 1)
        assert {body.get("ignore_eos") for body in measured(script)} == {asked}
        assert {body["model"] for body in measured(script)} == {"default" if asked else "scripted"}


def test_completions_are_measured_as_well_as_chats() -> None:
    with scripted_server(Script(answer=counting)) as script:
        plan = LoadPlan(endpoint="completions", prompt_tokens=51, output_tokens=3, requests=2, warmup=0)
        level = run_level(prepare(Client(script.url), plan), plan, 2)
    assert (level.failed, level.output_tokens) == (0, 6)


def test_a_sample_holds_the_arrival_of_every_chunk_with_text() -> None:
    with scripted_server(Script(answer=lambda _: Answer(pieces=("a", "", "b"), usage=False))) as script:
        sample = measure(Client(script.url), "chat/completions", {"stream": True})
    assert len(sample.arrivals) == 2
    assert sample.started < sample.arrivals[0] <= sample.arrivals[1] <= sample.ended
    assert sample.completion_tokens is None and sample.tokens == 2


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="the shortest prompt is about 11 tokens"):
        calibrate(8, lambda words: 2 * words + OVERHEAD)


@pytest.mark.parametrize(("wanted", "per_word", "around"), [(128, 1, 30), (1000, 1.3, 5), (64, 2, 0), (40, 1, 38)])
def test_calibration_comes_within_one_word(wanted: int, per_word: float, around: int) -> None:
    words = calibrate(wanted, lambda count: round(per_word * count) + around)
    assert abs(per_word * words + around - wanted) <= max(per_word, 0.02 * wanted)


def test_the_words_are_many_and_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) > 90


def test_the_plan_is_read_from_the_flags() -> None:
    assert read_plan({}) == LoadPlan()
    given = {"concurrency": "1,2", "requests": "9", "endpoint": "completions", "name": "m", "seed": "3"}
    expected = LoadPlan(concurrency=(1, 2), requests=9, endpoint="completions", model="m", seed=3)
    assert read_plan(given) == expected


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    flags = ("--concurrency", "1,3", "--prompt-tokens", "51", "--output-tokens", "5", "--requests", "3")
    with scripted_server(Script(answer=counting)) as script:
        done = bench(script, tmp_path, *flags, "--json", "x.json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:5] for row in rows] == [["1", "3", "0", "51", "5"], ["3", "3", "0", "51", "5"]]
    report = json.loads((tmp_path / "x.json").read_text())
    assert [level["output_tokens"] for level in report["levels"]] == [15, 15]
    assert report["plan"]["concurrency"] == [1, 3]
    assert report["levels"][0]["ttft"]["p50"] > 0


def test_failed_requests_fail_the_command_and_are_named(tmp_path: Path) -> None:
    def refusing(body: Mapping[str, Any]) -> Answer:
        full = Answer(status=429, body=b'{"error": {"message": "full"}}')
        return full if body.get("stream") else counting(body)

    with scripted_server(Script(answer=refusing)) as script:
        done = bench(script, tmp_path, "--concurrency", "2", "--prompt-tokens", "51", "--requests", "2")
    assert done.returncode == 1
    assert done.stderr == "ingot bench: 2 streams: 2x full (HTTP 429)\n"


def test_a_server_that_counts_no_tokens_is_refused(tmp_path: Path) -> None:
    with scripted_server(Script(answer=lambda _: Answer(status=200, prompt_tokens=None))) as script:  # type: ignore[arg-type]
        done = bench(script, tmp_path)
    assert done.returncode == 1
    assert "usage.prompt_tokens" in done.stderr
