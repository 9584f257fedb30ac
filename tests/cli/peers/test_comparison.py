from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.cli.client import ServerError
from ingot.cli.peers import report, works
from ingot.cli.peers.comparison import OURS, THEIRS, Figure, Match, Trouble, do_work, wins
from ingot.cli.peers.models import Traits
from ingot.cli.peers.report import Contender, Report, terminal_lines, value_text
from ingot.cli.peers.session import Course, Heard
from ingot.cli.peers.table import find_peer
from ingot.cli.peers.works import WORKS, Load, NotSupported, Work, picture, problem_with

TRAITS = Traits(context=8192, tools=False, vision=False, hybrid=False, draft_head=False)


class Fake:
    """A server's process; `dies` says how it ends when a connection breaks."""

    def __init__(self, name: str, dies: str | None = None) -> None:
        self.name, self.dies, self.dead, self.running = name, dies, None, True
        self.starts = 0

    def dead_soon(self) -> str | None:
        self.dead = self.dies
        return self.dead

    def stop(self) -> None:
        self.running, self.dead = False, None

    def start(self) -> float:
        self.starts += 1
        self.running = True
        return 1.0


def done(ours: Fake, theirs: Fake, *works: Work) -> Match:
    match = Match(theirs.name)
    for work in works:
        do_work((ours, theirs), work, Load(TRAITS), match)  # type: ignore[arg-type]
    return match


def figure(name: str, ours: list[float], theirs: list[float], work: str = "streams") -> Figure:
    return Figure(work, name, (dict(enumerate(ours)), dict(enumerate(theirs))))


def test_servers_take_as_much_at_once_as_a_prompt_beside_streams_needs() -> None:
    assert Load(TRAITS, streams=(1,)).most_streams == works.BESIDE_STREAMS + 1
    assert Load(TRAITS, streams=(1, 8)).most_streams == 8


def test_whoever_times_a_first_token_asks_for_more_than_one_as_one_may_have_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def listen(client: Any, body: dict[str, Any]) -> Heard:
        asked.append(body["max_tokens"])
        return Heard("word", (), 1.0, 2.0, {})

    flowing = SimpleNamespace(waits=lambda since, until: [0.1], seconds=[0.1])
    for name in ("Stream", "HealthProbes"):
        monkeypatch.setattr(works, name, lambda *_: nullcontext(flowing))
    monkeypatch.setattr(works, "listen", listen)
    server: Any = SimpleNamespace(client=None, peer=find_peer("ingot"), ask=lambda body: body)
    assert list(works.beside(server, Load(TRAITS, rounds=1)))
    assert len(asked) == 2 and min(asked) > 1


def test_servers_take_turns_step_by_step_and_who_goes_first_changes() -> None:
    order: list[tuple[str, int]] = []

    def work(server: Any, load: Load) -> Iterator[dict[str, float | None]]:
        for step in range(3):
            order.append((server.name, step))
            yield {"first token": 1.0 if server.name == "a" else 2.0}

    match = done(Fake("a"), Fake("b"), Work("streams", "", work))
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    (found,) = match.figures
    assert found.ratios == [2.0, 2.0, 2.0] and found.verdict == "ahead"


def test_what_a_server_cannot_do_and_what_goes_wrong_is_told_and_the_other_goes_on() -> None:
    def unable(server: Any, load: Load) -> Iterator[dict[str, float | None]]:
        if server.name == "b":
            raise NotSupported("no images")
        yield {"first question": 1.0}

    def failing(server: Any, load: Load) -> Iterator[dict[str, float | None]]:
        yield {"answered": 1.0}
        if server.name == "b":
            raise ServerError("the connection broke")
        yield {"answered": 1.0}

    def odd(server: Any, load: Load) -> Iterator[dict[str, float | None]]:
        if server.name == "b":
            raise KeyError("usage")
        yield {"cold": 1.0}

    works = (Work("images", "", unable), Work("overload", "", failing), Work("kill", "", odd))
    theirs = Fake("b")
    match = done(Fake("a"), theirs, *works)
    assert [(each.work, each.kind) for each in match.troubles] == [
        ("images", "not supported"),
        ("overload", "failed"),
        ("kill", "failed"),
    ]
    assert len(match.figure("overload", "answered").found[OURS]) == 2
    assert len(match.figure("overload", "answered").found[THEIRS]) == 1
    assert theirs.starts == 0


def test_a_server_that_died_is_told_as_dead_and_started_again_for_the_next_work() -> None:
    def deadly(server: Any, load: Load) -> Iterator[dict[str, float | None]]:
        yield {"answered": 1.0}
        if server.name == "b":
            raise ServerError("the connection broke")

    theirs = Fake("b", dies="ended by SIGKILL")
    match = done(Fake("a"), theirs, Work("overload", "", deadly))
    assert [str(each) for each in match.troubles] == [
        "b, overload: died: ended by SIGKILL, after: the connection broke"
    ]
    assert theirs.starts == 1


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "ratio", "verdict"),
    [
        ("8 at once: tokens/s", [20.0, 30.0, 10.0], [10.0, 10.0, 20.0], 2.0, "even"),
        ("8 at once: tokens/s", [20.0, 30.0], [10.0, 10.0], 2.5, "ahead"),
        ("next turn", [1.0, 3.0], [2.0, 9.0], 2.5, "ahead"),
        ("next turn", [2.0, 2.0], [1.0, 1.5], 0.625, "behind"),
        ("next turn", [2.0], [1.0], 0.5, ""),
        ("speed it keeps", [0.75], [0.5], 1.5, ""),
        ("speed it keeps", [0.75, 0.4], [0.5, 0.8], 1.0, "even"),
        ("speed it keeps", [0.75, 1.0], [0.5, 0.5], 1.75, "ahead"),
        ("at rest", [100.0], [50.0], 0.5, "behind"),
        ("at rest", [100.0], [102.0], 1.02, "even"),
        ("reused", [1.0, 0.9], [0.5, 0.5], None, "ahead"),
        ("failed", [0.0], [0.25], None, "ahead"),
        ("valid JSON", [1.0], [1.0], None, "even"),
        ("next turn", [1.0], [], None, ""),
        ("8 at once: tokens of an answer", [3.0], [8.0], None, ""),
    ],
)
def test_a_ratio_says_how_many_times_better_ours_is_and_the_verdict_needs_every_step(
    name: str, ours: list[float], theirs: list[float], ratio: float | None, verdict: str
) -> None:
    found = figure(name, ours, theirs)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio))
    assert found.verdict == verdict


def a_report() -> Report:
    match = Match("other", [figure("next turn", [1.0, 2.0], [2.0, 8.0], "agent"), figure("at rest", [9.0], [3.0])])
    match.figures[1].work = "memory"
    match.troubles.append(Trouble("other", "images", "not supported", "no images"))
    servers = [Contender("ingot", "1.0", "ingot serve m"), Contender("other", "2.0", "other m")]
    absent = [("omlx", "runs on macOS alone")]
    return Report("m", ["m", "--quick"], Load(TRAITS), servers, [match], ["a note"], absent, load_before=0.0)


def test_the_page_repeats_the_command_with_the_variables_that_servers_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_THREADS", "1")
    assert "INGOT_THREADS=1 ingot bench peers m --quick" in "\n".join(a_report().markdown())


def test_the_page_says_whether_others_used_the_machine() -> None:
    quiet, busy = ("\n".join(replace(a_report(), load_before=load).markdown()) for load in (0.0, 1000.0))
    assert "with a load of 1000.0 before the run" in busy and "The machine was busy" in busy
    assert "The machine was busy" not in quiet


def test_the_page_has_commands_versions_wins_losses_and_what_was_not_possible() -> None:
    page = "\n".join(a_report().markdown())
    assert "ingot bench peers m --quick" in page
    assert "| other | 2.0 | `other m` |" in page and "| omlx | | runs on macOS alone |" in page
    assert "ingot is ahead in 1 figures, behind in 1, even in 0" in page
    assert "| agent: next turn | 1500 ms | 5000 ms | 3.00x (2.00 to 4.00) | ahead |" in page
    assert "| memory: at rest | 9 MB | 3 MB | 0.33x | behind |" in page
    assert "- other, images: not supported: no images" in page and "- a note" in page


def test_the_json_has_every_step_and_the_terminal_every_figure() -> None:
    found = a_report().as_json()
    (listed,) = found["matches"]
    assert listed["figures"][0]["ours"] == {0: 1.0, 1: 2.0} and listed["figures"][0]["spread"] == (2.0, 4.0)
    assert found["load"]["traits"]["context"] == 8192 and "session" not in found["load"]
    match = a_report().matches[0]
    (line,) = terminal_lines(match, "agent")
    assert line.split() == "agent: next turn 1500 ms 5000 ms 3.00x (2.00 to 4.00) ahead".split()  # noqa: SIM905
    assert [line.strip() for line in terminal_lines(match, "images")] == [str(match.troubles[0])]


def test_a_report_is_a_page_json_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.plots, "available", lambda: False)
    assert [path.name for path in a_report().write(tmp_path)] == ["report.md", "report.json"]
    pytest.importorskip("matplotlib")
    monkeypatch.undo()
    names = [path.name for path in a_report().write(tmp_path / "new")]
    assert names[2:] == ["ratios.png", "ratios.svg", "turns.png", "turns.svg"]
    assert "<svg" in (tmp_path / "new" / "turns.svg").read_text()


def test_values_are_told_in_their_units() -> None:
    values = ((0.5, "%"), (0.5, "part"), (0.12, "s"), (12.0, "s"), (3.0, "MB"), (None, "s"))
    assert [value_text(*each) for each in values] == ["50%", "50%", "120 ms", "12.0 s", "3 MB", "-"]


def test_a_session_fits_the_context() -> None:
    assert Load(Traits(32_768, False, False, False, False)).course == Course(10, 16_000, 10_000)
    short = Load(TRAITS).course
    assert short.tokens == 8192 - 1024 and 0 < short.opening < short.tokens


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"age": 3, "role": "user", "tags": ["a", "b"]}', None),
        ("It is three.", "it is not JSON"),
        ('{"age": 3} ', None),
        ('{"role": "user"}', "it has no age"),
        ('{"age": true}', "it.age is no integer"),
        ('{"age": 151}', "it.age is 151"),
        ('{"age": 3, "role": "king"}', "it.role is none of"),
        ('{"age": 3, "more": 1}', "not in the schema"),
        ('{"age": 3, "tags": ["long"]}', "it.tags[0] has 4 characters"),
        ('{"age": 3, "tags": ["a", "b", "c"]}', "it.tags has 3 items"),
        ("[]", "it is no object"),
    ],
)
def test_json_is_checked_by_its_schema(text: str, problem: str | None) -> None:
    found = problem_with(text, SCHEMA)
    assert found is None if problem is None else found is not None and problem in found


def test_a_word_of_a_schema_that_is_not_checked_is_an_error() -> None:
    with pytest.raises(ValueError, match="pattern"):
        problem_with('"a"', {"type": "string", "pattern": "b"})


def test_pictures_are_png_files() -> None:
    assert picture(32, 1)[:8] == b"\x89PNG\r\n\x1a\n" and picture(32, 1) != picture(32, 2)


def test_every_work_has_a_name_of_its_own_and_the_outcome_is_a_sentence() -> None:
    assert len({work.name for work in WORKS}) == len(WORKS)
    assert wins([Match("other")]) == "against other, ingot is ahead in 0 figures, behind in 0, even in 0"


class Answering(Fake):
    """One that is asked by way of `works.listen`, and takes two seconds to start."""

    client = None
    peer = find_peer("mlx_lm.server")

    def ask(self, body: Any) -> Any:
        return body

    def start(self) -> float:
        return 2.0


def test_a_start_is_also_measured_up_to_the_next_turns_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "listen", lambda client, body: Heard("yes", (), 0.5, 1.0, {}))
    load = Load(TRAITS, rounds=1)
    (found,) = works.restart(Answering("other"), load)  # type: ignore[arg-type]
    assert found["ready after a restart"] == 2.0
    assert found["start and next turn after a restart"] == 2.5


@pytest.mark.parametrize(
    ("text", "seconds"), [('{"name": "A", "age": 3, "role": "user", "tags": []}', 1.0), ("I am Ada.", None)]
)
def test_only_answers_that_are_json_by_the_schema_have_seconds(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None
) -> None:
    monkeypatch.setattr(works, "listen", lambda client, body: Heard(text, (), 0.5, 1.0, {}))
    found, *_ = works.structured(Answering("other"), Load(TRAITS, answers=1))  # type: ignore[arg-type]
    assert found["seconds"] == seconds
