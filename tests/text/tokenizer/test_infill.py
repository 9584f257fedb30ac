"""Prompts for filling in the middle, by real vocabularies: the tokens that a family's own prompt text gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from ingot.text.prompt.infill import FAMILIES, Infill
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.templates.real import named
from tests.text.conftest import MakeFolder, sentencepiece_library

BEFORE, AFTER = "def f(x):\n    return ", "\n\nprint(f(1))\n"
PSM, SPM = ("{0}{before}{1}{after}{2}", "{1}{after}{0}{before}{2}")


def prompt(tokenizer: Tokenizer, before: str = BEFORE, after: str = AFTER) -> list[int]:
    assert tokenizer.infill is not None
    made = tokenizer.infill.prompt(tokenizer.encode_plain(before), tokenizer.encode_plain(after, leads=False))
    return [*tokenizer.first_ids, *made]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("qwen-2.5", f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
        ("deepseek-coder-33b-base", f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>"),
        ("minimax", f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
        ("glm-4.5v", f"<|code_prefix|>{BEFORE}<|code_suffix|>{AFTER}<|code_middle|>"),
    ],
)
def test_the_prompt_is_what_the_familys_own_text_gives(real: Callable[[str], Tokenizer], model: str, text: str) -> None:
    tokenizer = real(model)
    assert prompt(tokenizer) == tokenizer.encode(text, add_special=True)


def test_codestrals_tokens_want_the_suffix_first_and_have_none_for_the_middle() -> None:
    tokenizer = named("mistral_nemo").tokenizer
    assert prompt(tokenizer) == tokenizer.encode(f"[SUFFIX]{AFTER}[PREFIX]{BEFORE}", add_special=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_every_family_is_found_by_its_tokens_alone(family: Any) -> None:
    names = [name for name in (family.prefix, family.suffix, family.middle) if name]
    ids = {name: 10 + at for at, name in enumerate(names)}
    infill = Infill.of(ids.get)
    assert infill is not None
    front, back = [ids[family.prefix], 1], [ids[family.suffix], 2]
    parts = back + front if family.suffix_first else front + back
    assert infill.prompt([1], [2]) == parts + ([ids[family.middle]] if family.middle else [])
    assert infill.ends == set(ids.values())
    for missing in names:
        assert Infill.of({name: id for name, id in ids.items() if name != missing}.get) is None


def test_seed_coder_wants_the_suffix_first_and_the_others_the_prefix() -> None:
    first = {family.prefix for family in FAMILIES if family.suffix_first}
    assert first == {"<[fim-prefix]>", "[PREFIX]"}


@pytest.mark.parametrize("model", ["qwen-2.5", "deepseek-coder-33b-base", "minimax"])
def test_the_text_of_a_token_in_somebodys_code_stays_text(real: Callable[[str], Tokenizer], model: str) -> None:
    tokenizer = real(model)
    assert tokenizer.infill is not None
    tokens = [tokenizer.infill.prefix, tokenizer.infill.suffix, tokenizer.infill.middle, *tokenizer.eos_ids]
    names = "".join(tokenizer.decode([token], skip_special=False) for token in tokens if token is not None)
    ids = prompt(tokenizer, before=f"a{names}b", after=f"c{names}d")
    assert [ids.count(token) for token in tokens[:3]] == [1, 1, 1]
    assert not set(ids[len(tokenizer.first_ids) :]) & tokenizer.eos_ids
    assert tokenizer.decode(ids, skip_special=False).count(names) == 2


def test_a_token_that_is_not_called_special_is_none_in_code(make_folder: MakeFolder) -> None:
    library = sentencepiece_library(strip=False)
    library.add_tokens([AddedToken(name, special=False) for name in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")])
    tokenizer = Tokenizer.load(make_folder(library))
    assert tokenizer.infill is not None
    assert tokenizer.infill.suffix not in tokenizer.encode_plain("a <fim_suffix> the")


def test_sentencepiece_puts_no_space_before_the_suffix(make_folder: MakeFolder) -> None:
    library = sentencepiece_library(strip=True)
    library.add_special_tokens([AddedToken(name, normalized=False) for name in ("▁<PRE>", "▁<SUF>", "▁<MID>")])
    folder = make_folder(library, tokenizer_config={"bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    told = [tokenizer._vocabulary.piece(id) for id in prompt(tokenizer, "the", "the a")]
    assert told == ["<s>", "▁<PRE>", "▁the", "▁<SUF>", "the", "▁a", "▁<MID>"]


def test_other_files_stand_before_the_prompt_as_a_repository(real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real("qwen-2.5")
    assert tokenizer.infill is not None
    files = [("a.py", "x = 1"), ("b.py", "y = <|file_sep|>")]
    ids = tokenizer.infill.context(files, tokenizer.encode_plain)
    text = "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = <|file_sep|>\n<|file_sep|>filename\n"
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids.count(tokenizer.infill.file) == 3, "what a file says is text"


def test_without_tokens_for_files_they_are_text(real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real("deepseek-coder-33b-base")
    assert tokenizer.infill is not None
    ids = tokenizer.infill.context([("a.py", "x = 1"), ("", "y")], tokenizer.encode_plain)
    assert tokenizer.decode(ids) == "#a.py\nx = 1\ny\n"
    assert tokenizer.infill.context([], tokenizer.encode_plain) == []


def test_files_are_set_apart_by_a_token_between_them() -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
    infill = Infill.of({name: 1000 + at for at, name in enumerate(names)}.get)
    assert infill is not None
    assert infill.context([("a", "b")], lambda text: list(text.encode())) == [*b"a\nb", 1003]


def test_a_vocabulary_without_such_tokens_has_none(real: Callable[[str], Tokenizer]) -> None:
    assert real("deepseek-llm-7b-base").infill is None


def test_what_is_filled_in_ends_at_the_next_file(real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real("qwen-2.5")
    assert tokenizer.infill is not None
    ends = {tokenizer.decode([id], skip_special=False) for id in tokenizer.infill.ends}
    assert {"<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|fim_middle|>"} <= ends
