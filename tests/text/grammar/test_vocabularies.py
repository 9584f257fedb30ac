"""Grammars over vocabularies of several kinds: sentencepiece, and those of real models with their own markers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.grammar.vocabulary import GrammarVocabulary
from ingot.text.parser.events import PastCall
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.registry import format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.walks import Walker, allowed

Load = Callable[[str], Tokenizer]


@contextmanager
def grammars_of(tokenizer: Tokenizer, more_rows: int = 0) -> Iterator[Grammars]:
    made = Grammars(tokenizer, tokenizer.vocab_size + more_rows)
    try:
        yield made
    finally:
        made.close()


def follow(grammar: CompiledGrammar | None, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokens that the model itself would write the text with are allowed, and make a complete answer."""
    assert grammar is not None
    matcher = grammar.begin()
    for token in tokenizer.encode(text, add_special=False):
        mask = matcher.mask()
        assert mask is not None and mask[token >> 5] >> (token & 31) & 1, tokenizer.token_text(token)
        matcher.accept(token)
    last = matcher.mask()
    return matcher.done or (last is not None and bool(set(allowed(last, tokenizer.vocab_size)) & tokenizer.eos_ids))


@pytest.mark.parametrize("name", ["llama-like", "gemma-like"])
def test_sentencepiece_vocabularies_write_what_a_grammar_says(made: Load, name: str) -> None:
    tokenizer = made(name)
    options = ["the a the", "abcé", "x the  the", "new\nline", "a☃"]
    with grammars_of(tokenizer, more_rows=9) as grammars:
        walker = Walker(tokenizer, random.Random(1))
        grammar = grammars.choice(options)
        written = {b"".join(map(tokenizer.token_bytes, walker.answer(grammar))).decode() for _ in range(60)}
        assert written == set(options)
        assert all(ord(character) < 128 for character in tokenizer.decode(walker.answer(grammars.regex("[a-z ]{9}"))))


@pytest.mark.parametrize("name", ["llama-like", "gemma-like"])
def test_text_within_an_answer_is_encoded_without_the_space_of_a_beginning(made: Load, name: str) -> None:
    tokenizer = made(name)
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    for text in ("the", " the", "a the", "☃", "<tool>"):
        assert b"".join(map(tokenizer.token_bytes, vocabulary.encode(text))).decode() == text


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        pytest.param("qwen-3.5", ("qwen3-coder", "qwen"), marks=pytest.mark.slow),
        ("deepseek-v3.1", ("deepseek-v3.1",)),
        pytest.param("minimax-m3", ("minimax-m3",), marks=pytest.mark.slow),
    ],
)
def test_real_models_write_calls_with_their_own_tokens(real: Load, name: str, formats: tuple[str, ...]) -> None:
    """As their chat templates would: with the markers that their vocabularies have tokens for."""
    tokenizer = real(name)
    tool = GrammarTool("get_weather", SCHEMA, strict=True)
    with grammars_of(tokenizer, more_rows=128) as grammars:
        for table in map(format_by_name, formats):
            call = render_calls(table, [PastCall("get_weather", {"city": 'Paris, "près"', "days": 3})])
            free = grammars.tools(table, [tool], "auto", parallel=True)
            assert follow(grammars.tools(table, [tool], "required", parallel=True), tokenizer, call)
            assert follow(free, tokenizer, call)
            assert follow(free, tokenizer, "No call: <b>{1}</b>.")
            thinking = grammars.answer(grammars.json_schema(SCHEMA), table, ThinkingStart.OPENED)
            assert table.thinking is not None
            assert follow(thinking, tokenizer, f'Hm.\n{table.thinking.close}\n\n{{"city": "Oslo", "days": 1}}')
