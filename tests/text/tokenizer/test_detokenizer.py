from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.text.tokenizer.detokenizer import PieceDetokenizer, ReleasedText, StopMatcher
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokenizer.vocabulary import FastVocabulary
from tests.text.conftest import sentencepiece_library
from tests.text.work import steps

REAL = ["qwen-2.5", "deepseek-v3", "glm-4.7-flash", "jiutian-139moe-chat"]
MADE = ["llama-like", "gemma-like"]
SLOW = {"deepseek-v3", "glm-4.7-flash"}  # spelled as qwen-2.5 is
ALL = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in REAL + MADE]
Loader = Callable[[str], Tokenizer]
share_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
TEXTS = [
    "The quick brown fox.",
    "  two  spaces\n\n\tand a tab ",
    "naïve façade, 日本語, 한국어, עברית",
    "😀👨‍👩‍👧🏳️‍🌈 emoji",
    "def f(x):\n    return x ** 2  # ok\n",
    "𒀀𒀁 rare",
]


@pytest.fixture
def load(real: Loader, made: Loader) -> Loader:
    return lambda name: real(name) if name in REAL else made(name)


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def mixed_ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Any ids, with some real text, special tokens and single bytes among them."""
    special = sorted(tokenizer.special_ids)
    parts = data.draw(
        st.lists(
            st.one_of(
                st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=4),
                st.lists(st.integers(0, 300), max_size=6),
                st.sampled_from(special).map(lambda id: [id]),
                st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text, add_special=False)),
            ),
            max_size=6,
        )
    )
    return [id for part in parts for id in part]


@pytest.mark.parametrize("name", ALL)
@share_fixtures
@given(data=st.data())
def test_the_pieces_make_up_what_decoding_all_at_once_gives(load: Loader, name: str, data: st.DataObject) -> None:
    tokenizer = load(name)
    ids = mixed_ids(tokenizer, data)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_never_shows_half_a_character(load: Loader, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special=True)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("�" not in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_token(real: Loader) -> None:
    tokenizer = real("qwen-2.5")
    ids = tokenizer.encode("𒀀", add_special=False)
    assert stream(tokenizer, ids) == [""] * (len(ids) - 1) + ["𒀀", ""]


def test_a_character_that_is_never_completed_shows_at_the_end(real: Loader) -> None:
    tokenizer = real("qwen-2.5")
    ids = tokenizer.encode("𒀀", add_special=False)[:-1]
    assert stream(tokenizer, ids)[-1] == tokenizer.decode(ids) != ""


def test_a_special_token_inside_a_character_does_not_break_it(made: Loader) -> None:
    tokenizer = made("llama-like")
    *head, tail = tokenizer.encode("the ö", add_special=False)
    assert tokenizer.eos_ids
    assert "".join(stream(tokenizer, [*head, *tokenizer.eos_ids, tail])) == "the ö"


def test_only_the_text_s_first_space_is_dropped(made: Loader) -> None:
    tokenizer = made("llama-like")
    ids = tokenizer.encode("the a the", add_special=True)
    assert stream(tokenizer, ids) == ["", "the", " a", " the", ""]


def test_words_come_out_one_by_one_and_not_at_the_end(made: Loader) -> None:
    tokenizer = made("gemma-like")
    pieces = stream(tokenizer, tokenizer.encode("the a the a", add_special=True))
    assert all(pieces[1:-1]) and pieces[-1] == ""


class CountingVocabulary(FastVocabulary):
    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("ids", [[260, 262], [4, 5, 6], [260, 200, 201, 265], [259]], ids=str)
def test_each_token_is_decoded_a_bounded_number_of_times(ids: list[int]) -> None:
    vocabulary = CountingVocabulary(sentencepiece_library(strip=True))
    anchor = vocabulary.id_of("a")
    assert anchor is not None
    detokenizer = PieceDetokenizer(vocabulary, anchor)
    many = ids * (20_000 // len(ids))
    text = "".join(map(detokenizer.push, many)) + detokenizer.flush()
    assert vocabulary.decoded <= 3 * len(many)
    assert text == vocabulary.decode(many, skip_special=True)


@pytest.mark.parametrize("name", ["qwen-2.5", "jiutian-139moe-chat"])
def test_twenty_thousand_tokens_give_the_text_that_they_decode_to(real: Loader, name: str) -> None:
    tokenizer = real(name)
    ids = [(n * 7919) % tokenizer.vocab_size for n in range(20_000)]
    text = "".join(stream(tokenizer, ids))
    assert text == tokenizer.decode(ids)


texts = st.text(alphabet="ab\n<", max_size=60)
stop_sets = st.lists(st.text(alphabet="ab\n<", min_size=1, max_size=5), max_size=4).map(tuple)


def run(pieces: list[str], strings: tuple[str, ...], keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(strings, keep)
    out = ""
    for piece in pieces:
        released = matcher.push(piece)
        out += released.text
        if released.stopped_by is not None:
            return out + matcher.flush(), released.stopped_by
    return out + matcher.flush(), None


def search(text: str, strings: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """The contract, said the slow way."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


def cut(text: str, offsets: list[int]) -> list[str]:
    edges = sorted({min(offset, len(text)) for offset in offsets} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stop_sets, st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_gives_what_a_plain_search_of_the_whole_text_gives(
    text: str, strings: tuple[str, ...], offsets: list[int], keep: bool
) -> None:
    assert run(cut(text, offsets), strings, keep) == search(text, strings, keep)


@given(texts, stop_sets)
def test_what_was_sent_is_always_a_prefix_of_the_final_text(text: str, strings: tuple[str, ...]) -> None:
    final, _ = search(text, strings, keep=False)
    matcher, sent = StopMatcher(strings, keep=False), ""
    for char in text:
        sent += matcher.push(char).text
        assert final.startswith(sent)


@given(texts, stop_sets)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(text: str, strings: tuple[str, ...]) -> None:
    matcher, sent = StopMatcher(strings, keep=False), ""
    for index, char in enumerate(text):
        released = matcher.push(char)
        sent += released.text
        if released.stopped_by is not None:
            return
        buffered = text[len(sent) : index + 1]
        assert buffered == "" or any(s.startswith(buffered) and s != buffered for s in strings)


def test_a_stop_string_split_over_tokens_never_leaks() -> None:
    matcher = StopMatcher(("</answer>",), keep=False)
    assert matcher.push("42</") == ReleasedText("42", None)
    assert matcher.push("ans") == ReleasedText("", None)
    assert matcher.push("wer>tail") == ReleasedText("", "</answer>")


def test_a_false_start_is_released_once_it_cannot_match() -> None:
    matcher = StopMatcher(("</answer>",), keep=False)
    matcher.push("</ans")
    assert matcher.push("!") == ReleasedText("</ans!", None)


def test_the_match_that_ends_first_wins_over_the_one_that_starts_first() -> None:
    assert run(["abcd"], ("abcd", "bc")) == ("a", "bc")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert run(["xab"], ("b", "ab")) == ("x", "ab")


def test_kept_stop_strings_end_the_text_and_hold_nothing_back() -> None:
    matcher = StopMatcher(("END",), keep=True)
    assert matcher.push("oneEN") == ReleasedText("oneEN", None)
    assert matcher.push("D two") == ReleasedText("D", "END")


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(("x",), keep=False)
    matcher.push("axb")
    assert matcher.push("c") == ReleasedText("", "x")
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher((), keep=False)
    assert matcher.push("anything") == ReleasedText("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest):
        StopMatcher(("a", ""), keep=False)


def test_a_character_costs_the_same_however_long_stop_strings_are() -> None:
    text = "a" * 4_000

    def matched(size: int) -> None:
        matcher = StopMatcher(("a" * size + "b", "a" * (size - 1) + "c"), keep=False)
        sent = sum(len(matcher.push(text[i : i + 3]).text) for i in range(0, len(text), 3))
        assert sent + len(matcher.flush()) == len(text)

    assert steps(lambda: matched(200)) < 2 * steps(lambda: matched(20))
