from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ingot.text.prompt.remembered import MOST_VARIANTS, RememberedAnswers


def test_an_answer_is_found_under_the_conversation_it_ended() -> None:
    answers = RememberedAnswers()
    answers.keep(b"one", "opening", [1, 2, 3], " Hm.\n")
    found = answers.recall(b"one")
    assert found is not None
    assert (found.opening, list(found.tokens), found.reasoning) == ("opening", [1, 2, 3], "Hm.")
    assert answers.recall(b"two") is None


def test_a_client_that_tells_what_was_thought_gets_only_that_answer() -> None:
    answers = RememberedAnswers()
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
    answers = RememberedAnswers()
    for number in range(MOST_VARIANTS + 2):
        answers.keep(b"one", "", [number], f"Thought {number}")
    assert answers.recall(b"one", "Thought 1") is None
    assert answers.recall(b"one", "Thought 2") is not None


def test_what_was_not_asked_for_longest_goes_first() -> None:
    answers = RememberedAnswers(most_tokens=3 * 200)
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
    answers = RememberedAnswers(most_tokens=100)
    answers.keep(b"one", "", range(1000))
    assert answers.recall(b"one") is None and len(answers) == 0


def test_many_threads_may_keep_and_recall_at_once() -> None:
    answers = RememberedAnswers(most_tokens=50_000)

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
