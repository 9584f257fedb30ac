from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cli import bench
from ingot.cli.bench import (
    PROMPT_WORDS,
    LatencySpread,
    LoadPlan,
    LoadTarget,
    RequestSample,
    calibrate_words,
    measure_request,
    prepare_target,
    quantile,
    read_load_plan,
    run_level,
    spread_of,
    summarise_level,
)
from ingot.cli.client import ServerClient
from ingot.errors import ConfigError
from tests.cli.scripted import Answer, Script, environment, scripted_server
from tests.processes import INGOT

OVERHEAD = 9


def text_of(body: Mapping[str, Any]) -> str:
    text: str = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return text


def counting(body: Mapping[str, Any]) -> Answer:
    """A server whose tokenizer takes two tokens a word, and whose template takes nine."""
    tokens = 2 * len(text_of(body).split()) + OVERHEAD
    return Answer(pieces=tuple("abcdefgh"[: body["max_tokens"]]), prompt_tokens=tokens)


def run_command(script: Script, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [INGOT, "bench", "serve", "--url", script.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(home), cwd=home)


def measured(script: Script) -> list[dict[str, Any]]:
    return [body for body in script.bodies if body.get("stream")]


def test_prompts_have_the_wanted_length_by_the_servers_own_count() -> None:
    with scripted_server(Script(answer=counting)) as script:
        plan = LoadPlan(prompt_tokens=101, output_tokens=4, concurrency=(2,), requests=3, warmup=0)
        level = run_level(prepare_target(ServerClient(script.url), plan), plan, 2)
    assert level.prompt_tokens == 3 * 101
    assert level.output_tokens == level.chunks == 3 * 4


def test_no_two_prompts_share_their_first_words_and_a_seed_repeats_them() -> None:
    def prompts(seed: int) -> list[str]:
        with scripted_server(Script(answer=counting)) as script:
            plan = LoadPlan(prompt_tokens=201, requests=6, warmup=2, seed=seed)
            run_level(prepare_target(ServerClient(script.url), plan), plan, 1)
        return [text_of(body) for body in measured(script)]

    first = prompts(seed=1)
    assert len({tuple(prompt.split()[:4]) for prompt in first}) == 8
    assert prompts(seed=1) == first
    assert not set(prompts(seed=2)) & set(first)


def test_so_many_streams_run_at_once_and_no_more() -> None:
    with scripted_server(Script(answer=counting, gathers=3)) as script:
        plan = LoadPlan(prompt_tokens=51, requests=7, warmup=0)
        level = run_level(prepare_target(ServerClient(script.url), plan), plan, 3)
    assert level.failed == 0
    assert script.most_at_once == 3


def test_ingot_is_asked_to_go_on_to_the_wanted_length_and_others_are_not() -> None:
    for owner, asked in (("ingot", True), ("someone", None)):
        with scripted_server(Script(answer=counting, owned_by=owner)) as script:
            plan = LoadPlan(prompt_tokens=51, requests=1)
            run_level(prepare_target(ServerClient(script.url), plan), plan, 1)
        assert {body.get("ignore_eos") for body in measured(script)} == {asked}
        assert {body["model"] for body in measured(script)} == {"default" if asked else "scripted"}


def test_completions_are_measured_as_well_as_chats() -> None:
    with scripted_server(Script(answer=counting)) as script:
        plan = LoadPlan(endpoint="completions", prompt_tokens=51, output_tokens=3, requests=2, warmup=0)
        level = run_level(prepare_target(ServerClient(script.url), plan), plan, 2)
    assert (level.failed, level.output_tokens) == (0, 6)


def test_a_sample_holds_the_arrival_of_every_chunk_with_text() -> None:
    with scripted_server(Script(answer=lambda _: Answer(pieces=("a", "", "b"), usage=False))) as script:
        sample = measure_request(ServerClient(script.url), "chat/completions", {"stream": True})
    assert len(sample.arrivals) == 2
    assert sample.started < sample.arrivals[0] <= sample.arrivals[1] <= sample.ended
    assert sample.completion_tokens is None and sample.tokens == 2


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="the shortest prompt is about 11 tokens"):
        calibrate_words(8, lambda words: 2 * words + OVERHEAD)


@pytest.mark.parametrize(("wanted", "per_word", "around"), [(128, 1, 30), (1000, 1.3, 5), (64, 2, 0), (40, 1, 38)])
def test_calibration_comes_within_one_word(wanted: int, per_word: float, around: int) -> None:
    words = calibrate_words(wanted, lambda count: round(per_word * count) + around)
    assert abs(per_word * words + around - wanted) <= max(per_word, 0.02 * wanted)


def test_the_words_are_many_and_distinct() -> None:
    assert len(set(PROMPT_WORDS)) == len(PROMPT_WORDS) > 90


def test_the_plan_is_read_from_the_flags() -> None:
    assert read_load_plan({}) == LoadPlan()
    given = {"concurrency": "1,2", "requests": "9", "endpoint": "completions", "name": "m", "seed": "3"}
    expected = LoadPlan(concurrency=(1, 2), requests=9, endpoint="completions", model="m", seed=3)
    assert read_load_plan(given) == expected


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    flags = ("--concurrency", "1,3", "--prompt-tokens", "51", "--output-tokens", "5", "--requests", "3")
    with scripted_server(Script(answer=counting)) as script:
        done = run_command(script, tmp_path, *flags, "--json", "x.json")
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
        done = run_command(script, tmp_path, "--concurrency", "2", "--prompt-tokens", "51", "--requests", "2")
    assert done.returncode == 1
    assert done.stderr == "ingot bench: 2 streams: 2x full (HTTP 429)\n"


def test_a_server_that_counts_no_tokens_is_refused(tmp_path: Path) -> None:
    with scripted_server(Script(answer=lambda _: Answer(status=200, prompt_tokens=None))) as script:  # type: ignore[arg-type]
        done = run_command(script, tmp_path)
    assert done.returncode == 1
    assert "usage.prompt_tokens" in done.stderr


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def test_the_figures_of_a_level_are_what_they_say() -> None:
    fast = RequestSample(started=0.0, ended=4.0, arrivals=(1.0, 2.0, 4.0), prompt_tokens=10, completion_tokens=3)
    slow = RequestSample(started=1.0, ended=10.0, arrivals=(4.0, 10.0), prompt_tokens=12, completion_tokens=4)
    level = summarise_level(2, [fast, slow])
    assert (level.concurrency, level.requests, level.failed, level.seconds) == (2, 2, 0, 10.0)
    assert (level.prompt_tokens, level.output_tokens, level.chunks, level.counted_by) == (22, 7, 5, "usage")
    assert level.output_tokens_per_second == pytest.approx(0.7)
    assert level.prompt_tokens_per_second == pytest.approx(2.2)
    assert level.requests_per_second == pytest.approx(0.2)
    assert level.ttft == LatencySpread(mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98), most=3.0)
    assert level.inter_token is not None and level.inter_token.p50 == 2.0 and level.inter_token.most == 6.0
    assert level.seconds_per_token is not None and level.seconds_per_token.mean == pytest.approx((1.5 + 2.0) / 2)
    assert level.request_tokens_per_second is not None
    assert level.request_tokens_per_second.mean == pytest.approx((3 / 4 + 4 / 9) / 2)


def test_chunks_are_counted_where_the_server_counts_no_tokens() -> None:
    bare = RequestSample(started=0.0, ended=2.0, arrivals=(1.0, 2.0))
    counted = RequestSample(started=0.0, ended=2.0, arrivals=(1.0,), completion_tokens=5)
    assert (summarise_level(1, [bare]).output_tokens, summarise_level(1, [bare]).counted_by) == (2, "chunks")
    assert summarise_level(1, [bare, counted]).counted_by == "chunks and usage"


def test_failed_requests_are_errors_and_nothing_else() -> None:
    good = RequestSample(started=0.0, ended=2.0, arrivals=(1.0, 2.0), completion_tokens=2)
    failed = RequestSample(started=0.0, ended=9.0, arrivals=(5.0,), error="full (HTTP 429)")
    empty = RequestSample(started=0.0, ended=1.0, completion_tokens=0)
    level = summarise_level(3, [good, failed, failed, empty])
    assert level.errors == {"full (HTTP 429)": 2, "the answer has no text": 1}
    assert (level.failed, level.output_tokens) == (3, 2)
    assert level.ttft is not None and level.ttft.most == 1.0


def test_a_level_without_a_success_has_no_spreads() -> None:
    level = summarise_level(1, [RequestSample(0.0, 1.0, error="no")])
    assert (level.ttft, level.inter_token, level.output_tokens_per_second) == (None, None, 0.0)


@given(VALUES, st.floats(0, 1))
def test_a_quantile_lies_between_its_neighbours(values: list[float], share: float) -> None:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    slack = 1e-9 * max(1.0, high)
    assert low - slack <= quantile(ordered, share) <= high + slack


@given(VALUES)
def test_a_spread_is_ordered_and_does_not_depend_on_the_order_of_its_values(values: list[float]) -> None:
    found = spread_of(values)
    assert found is not None and found == spread_of(values[::-1])
    slack = 1e-9 * max(1.0, found.most)
    assert min(values) <= found.p50 + slack <= found.p90 + 2 * slack <= found.p99 + 3 * slack
    assert found.p99 <= found.most + slack == max(values) + slack


TARGET = LoadTarget(ServerClient("http://127.0.0.1:1"), "m", is_ingot=False, words=9)
GOOD = summarise_level(1, [RequestSample(0.0, 2.0, arrivals=(0.5, 1.0, 2.0), prompt_tokens=7, completion_tokens=3)])
BAD = summarise_level(4, [RequestSample(0.0, 1.0, error="no")])


def test_a_row_of_the_table_holds_milliseconds_and_rates() -> None:
    cells = bench.load_table_row(GOOD).split()
    assert cells == ["1", "1", "0", "7", "3", "1.5", "1.5", "500.0", "500.0", "500.0", "750.0", "950.0", "995.0"]


def test_a_level_that_failed_altogether_shows_dashes() -> None:
    assert bench.load_table_row(BAD).split() == ["4", "0", "1", "-", "-", "0.0", *["-"] * 7]


def test_rows_line_up_with_the_head() -> None:
    assert len(bench.load_table_head()) == len(bench.load_table_row(GOOD))


def test_the_json_holds_every_figure(tmp_path: Path) -> None:
    bench.write_json(tmp_path / "x.json", bench.load_report(TARGET, LoadPlan(), [GOOD, BAD]))
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["server"] == {"url": "http://127.0.0.1:1", "model": "m", "is_ingot": False}
    assert written["levels"][0]["inter_token"]["p50"] == 0.75
    assert written["levels"][1] | {"ttft": None, "failed": 1, "errors": {"no": 1}} == written["levels"][1]


def test_a_plot_is_drawn_also_where_a_level_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.write_load_plot(tmp_path / "x.svg", TARGET, LoadPlan(), [GOOD, BAD])
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="extras add bench"):
        bench.require_plotting(Path("x.png"))


def test_a_plot_in_an_unknown_format_is_refused_beforehand() -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        bench.require_plotting(Path("x.bmp"))
