from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.prompt.assembly import EncodingCache, PromptAssembler, TokenOwner
from ingot.text.tokenizer.special_tokens import ControlTokenQuoting
from ingot.text.tokenizer.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]
WORDS = st.lists(
    st.sampled_from(["<s>", "</s>", "<tool>", "the", " the", "a", " ", "  ", "\n", "é", "😀", "quick", "<", "s>"]),
    max_size=12,
)


class Counting:
    """A tokenizer that says what it had to encode."""

    def __init__(self) -> None:
        self.encoded_texts: list[str] = []

    def encode(self, text: str, *, add_special: bool, quoted: Any = None) -> list[int]:
        self.encoded_texts.append(text)
        return list(text.encode())

    def encode_with_offsets(
        self, text: str, offsets: Sequence[int], *, add_special: bool, quoted: Any = None
    ) -> tuple[list[int], list[int]]:
        return self.encode(text, add_special=add_special), list(offsets)


def encoded(encodings: EncodingCache, counting: Any, text: str, salt: str = "") -> list[int]:
    return list(encodings.encode(counting, text, [len(text)], salt=salt)[0])


def test_a_text_is_encoded_once() -> None:
    encodings, counting = EncodingCache(), Counting()
    assert [encoded(encodings, counting, "Hi") for _ in range(3)] == [[72, 105]] * 3
    assert counting.encoded_texts == ["Hi"]


def test_salts_do_not_help_each_other() -> None:
    encodings, counting = EncodingCache(), Counting()
    encoded(encodings, counting, "Hi", "mine")
    encoded(encodings, counting, "Hi", "yours")
    assert counting.encoded_texts == ["Hi", "Hi"]


def test_places_are_part_of_what_was_asked() -> None:
    encodings, counting = EncodingCache(), Counting()
    tokenizer: Any = counting
    assert list(encodings.encode(tokenizer, "Hi", [1, 2], salt="")[1]) == [1, 2]
    assert list(encodings.encode(tokenizer, "Hi", [2], salt="")[1]) == [2]


def test_what_was_not_asked_for_longest_is_forgotten() -> None:
    encodings, counting = EncodingCache(most_bytes=2000), Counting()
    for text in ("a" * 100, "b" * 100, "a" * 100, "c" * 100, "a" * 100, "b" * 100):
        encoded(encodings, counting, text)
    assert [text[0] for text in counting.encoded_texts] == ["a", "b", "c", "b"]


def test_many_threads_may_ask_at_once() -> None:
    encodings = EncodingCache(most_bytes=5000)

    def work(number: int) -> bool:
        return all(encoded(encodings, Counting(), f"{number}{turn % 9}") for turn in range(300))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("name", ["llama-like", "gemma-like"])
def test_a_text_in_strands_gives_the_tokens_of_the_whole(made: Load, name: str) -> None:
    tokenizer = made(name)

    @given(WORDS, st.data())
    def holds(words: list[str], data: st.DataObject) -> None:
        assembler = PromptAssembler(tokenizer, EncodingCache(), "", ControlTokenQuoting())
        cuts = data.draw(st.lists(st.integers(0, len(words)), max_size=4).map(sorted))
        for at, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(words)], strict=True)):
            assembler.add_text(TokenOwner(at, "user"), "".join(words[begin:end]))
        tokens, spans = assembler.assemble(add_special=False)
        assert list(tokens) == tokenizer.encode("".join(words), add_special=False)
        assert spans[-1].end == len(tokens)

    holds()


@pytest.mark.parametrize(
    "name", ["qwen-3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-v3", "minimax"))]
)
def test_tokens_are_counted_up_to_each_place(real: Load, name: str) -> None:
    tokenizer = real(name)
    text = "Ünïcode 😀 text,\n\n  and more of it"
    ids, counts = tokenizer.encode_with_offsets(text, range(len(text) + 1), add_special=False)
    assert ids == tokenizer.encode(text, add_special=False)
    assert counts == sorted(counts) and counts[-1] == len(ids)
    for offset, count in enumerate(counts):
        assert text.startswith(tokenizer.decode(ids[:count]).rstrip("\ufffd"))
        assert len(tokenizer.decode(ids[:count]).rstrip("\ufffd")) <= offset
