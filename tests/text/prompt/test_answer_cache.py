"""Answers that outlast the server, in a file that anything may happen to."""

from __future__ import annotations

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.text.prompt.answer_cache import MOST_ANSWER_VARIANTS, AnswerCache, AnswerFile, answers_path
from tests.engines import tiny_tokenizer


def test_an_answer_is_found_under_the_conversation_it_ended() -> None:
    answers = AnswerCache()
    answers.keep(b"one", "opening", [1, 2, 3], " Hm.\n")
    found = answers.recall(b"one")
    assert found is not None
    assert (found.opening, list(found.tokens), found.reasoning) == ("opening", [1, 2, 3], "Hm.")
    assert answers.recall(b"two") is None


def test_a_client_that_tells_what_was_thought_gets_only_that_answer() -> None:
    answers = AnswerCache()
    answers.keep(b"one", "", [1], "First thought")
    answers.keep(b"one", "", [2], "Second thought")
    assert [list(found.tokens) for text in (None, "First thought") if (found := answers.recall(b"one", text))] == [
        [2],
        [1],
    ]
    assert answers.recall(b"one", "First\n\nthought ") is not None
    assert answers.recall(b"one", "Edited thought") is None
    assert answers.recall(b"one", "") is None


def test_no_more_than_a_few_answers_are_kept_of_one_conversation() -> None:
    answers = AnswerCache()
    for number in range(MOST_ANSWER_VARIANTS + 2):
        answers.keep(b"one", "", [number], f"Thought {number}")
    assert answers.recall(b"one", "Thought 1") is None
    assert answers.recall(b"one", "Thought 2") is not None


def test_what_was_not_asked_for_longest_goes_first() -> None:
    answers = AnswerCache(most_tokens=3 * 200)
    for thread in (b"one", b"two", b"three"):
        answers.keep(thread, "", range(100))
    assert answers.recall(b"one") is not None
    answers.keep(b"four", "", range(100))
    assert [answers.recall(thread) is not None for thread in (b"one", b"two", b"three", b"four")] == [
        True,
        False,
        True,
        True,
    ]


def test_an_answer_larger_than_the_store_is_not_kept() -> None:
    answers = AnswerCache(most_tokens=100)
    answers.keep(b"one", "", range(1000))
    assert answers.recall(b"one") is None and len(answers) == 0


def test_many_threads_may_keep_and_recall_at_once() -> None:
    answers = AnswerCache(most_tokens=50_000)

    def work(number: int) -> bool:
        for turn in range(200):
            thread = bytes([number, turn % 20])
            answers.keep(thread, "", [number, turn])
            found = answers.recall(thread)
            if found is not None and found.tokens[0] != number:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    answers.clear()
    assert len(answers) == 0
    answers.keep(b"one", "", [1])
    assert answers.recall(b"one") is not None


SECRET = b"ours"


def restarted(path: Path, secret: bytes = SECRET) -> tuple[AnswerCache, AnswerFile]:
    file = AnswerFile(path, secret)
    return AnswerCache(journal=file), file


def test_the_next_server_remembers_what_this_one_generated(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.sqlite"
    answers, file = restarted(path)
    answers.keep(b"one", "opening", [1, 2, 3], " Hm.\n", "}")
    answers.keep(b"one", "", [4], "Else")
    answers.keep(b"two", "", [5])
    file.close()
    again, file = restarted(path)
    found = again.recall(b"one", "Hm.")
    assert found is not None and (found.opening, list(found.tokens), found.missing) == ("opening", [1, 2, 3], "}")
    newest = again.recall(b"one")
    assert newest is not None and list(newest.tokens) == [4]
    assert len(again) == 2
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@settings(max_examples=25)
@given(cut=st.floats(0, 1, exclude_max=True), noise=st.binary(max_size=40))
def test_a_damaged_file_is_a_shorter_memory(tmp_path_factory: pytest.TempPathFactory, cut: float, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("answers") / "answers.sqlite"
    answers, file = restarted(path)
    for number in range(20):
        answers.keep(bytes([number]), "", [number] * 50)
    file.close()
    raw = path.read_bytes()
    path.write_bytes(raw[: int(cut * len(raw))] + noise)
    again, file = restarted(path)
    for number in range(20):
        found = again.recall(bytes([number]))
        assert found is None or list(found.tokens) == [number] * 50
    again.keep(b"new", "", [9])
    file.close()
    last, file = restarted(path)
    file.close()
    assert last.recall(b"new") is not None or path.exists()


def test_words_that_another_secret_sealed_or_that_were_changed_are_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    for secret in (b"theirs", SECRET):
        answers, file = restarted(path, secret)
        answers.keep(secret, "opening", [1, 2, 3], "reasoning")
        answers.keep(b"changed", "opening", [4, 5], "reasoning")
        file.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE answers SET opening = 'I obey.' WHERE thread = ?", (b"changed",))
    again, file = restarted(path)
    file.close()
    assert again.recall(SECRET) is not None
    assert again.recall(b"theirs") is None and again.recall(b"changed") is None


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").symlink_to(tmp_path / "elsewhere")
    answers, file = restarted(tmp_path / "answers.sqlite")
    answers.keep(b"one", "", [1])
    file.close()
    assert not (tmp_path / "elsewhere").exists()


def test_no_more_is_kept_than_there_is_memory_for(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "a.sqlite", SECRET, most_tokens=2000)
    for number in range(600):
        file.add(number.to_bytes(2, "big"), next(iter(_made(number))))
    file.close()
    found = list(AnswerFile(tmp_path / "a.sqlite", SECRET).read())
    assert 0 < len(found) < 600 and found[-1][0] == (599).to_bytes(2, "big")


def _made(number: int) -> list[object]:
    cache = AnswerCache()
    cache.keep(b"x", "", [number])
    return [cache.recall(b"x")]


def test_a_place_that_cannot_be_written_is_a_memory_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    answers, file = restarted(tmp_path / "file" / "answers.sqlite")
    answers.keep(b"one", "", [1])
    file.close()
    assert answers.recall(b"one") is not None


def test_another_vocabulary_has_another_file(tmp_path: Path) -> None:
    one = tiny_tokenizer()
    assert answers_path(tmp_path, one, "a") == answers_path(tmp_path, tiny_tokenizer(), "a")

    class Other:
        vocab_size = one.vocab_size

        def token_bytes(self, token: int) -> bytes:
            return one.token_bytes(token) + b"."

    assert answers_path(tmp_path, Other(), "a") != answers_path(tmp_path, one, "a")  # type: ignore[arg-type]


def test_another_model_of_the_same_vocabulary_has_another_file(tmp_path: Path) -> None:
    assert answers_path(tmp_path, tiny_tokenizer(), "a") != answers_path(tmp_path, tiny_tokenizer(), "b")
