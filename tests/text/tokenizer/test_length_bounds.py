"""How few tokens a text can have, with real tokenizers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from ingot.errors import ModelError
from ingot.text.tokenizer import vocabulary
from ingot.text.tokenizer.length_bounds import check_growth, step_growth
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.templates.real import MODELS, TOKENIZERS, Real, named
from tests.text.conftest import MakeFolder, sentencepiece_library

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


def table(*texts: bytes) -> dict[str, Any]:
    raw = (8).to_bytes(4, "little") + bytes(8) + b"\0".join(texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


@pytest.mark.parametrize(
    "step",
    [
        None,
        {"type": "NFKC"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Sequence", "normalizers": [table(b"ab", b"c" * 33), SPACES]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}] * 20},
        {"type": "Sequence", "normalizers": [SPACES, {"type": "Lowercase"}, DOUBLE]},
    ],
)
def test_what_real_tokenizers_do_is_taken(tmp_path: Path, step: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": step, "decoder": step, "model": {"vocab": {}}}))
    check_growth(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Sequence", "normalizers": [DOUBLE] * 30},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 5}] * 6},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000},
        {"type": "Prepend", "prepend": "x" * 1000},
        table(b"x" * 1000),
    ],
)
@pytest.mark.parametrize("name", ["normalizer", "decoder"])
def test_a_bomb_is_refused_by_its_file(tmp_path: Path, step: Any, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({name: step}))
    with pytest.raises(ModelError, match="times longer"):
        check_growth(tmp_path / "tokenizer.json")


def test_no_bomb_is_set_off_by_loading_it(tmp_path: Path) -> None:
    library = Library(models.BPE())
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 60)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="times longer"):
        vocabulary.load_vocabulary(tmp_path, {}, {})


def test_growth_is_at_least_what_the_library_does() -> None:
    step = normalizers.Sequence([normalizers.Replace("a", "aa"), normalizers.Prepend("aa")] * 3)
    made = json.loads(step.__getstate__())
    assert len(step.normalize_str("a")) <= step_growth(made)


Load = Callable[[str], Tokenizer]
DISTINCT = [model for model in MODELS if model.name not in TOKENIZERS]
UNKNOWN = {"minimax", "minimax-m3"}
"""Vocabularies whose files do not say that nothing of a text is left out."""


QUICK = {"qwen-3", "smollm2-135m", "mistral_nemo"}
"""One of each way to cut texts into words."""


def params(models: Iterable[Real]) -> list[Any]:
    return [
        pytest.param(model, id=model.name, marks=() if model.name in QUICK else pytest.mark.slow) for model in models
    ]


@cache
def longest(model: Real) -> list[str]:
    """The texts of the tokens that cover most, of each kind of character."""
    tokenizer = model.tokenizer
    texts = [tokenizer.token_bytes(token).decode(errors="ignore") for token in range(tokenizer.vocab_size)]
    kinds: list[Callable[[str], int]] = [
        len,
        lambda text: sum(map(str.isalpha, text)),
        lambda text: sum(map(str.isspace, text)),
        lambda text: len(text.encode()) - len(text),
    ]
    return [text for kind in kinds for text in nlargest(8, texts, key=kind)]


HOSTILE = [
    "▁" * 40,
    " " * 300,
    "\n" * 50,
    "-" * 200,
    "=" * 200,
    "e\u0301",
    "\u1112\u1161\u11ab" * 9,
    "\u212a",
    "K",
    "<\u0338",
    "\x00",
    "😀",
]


@pytest.mark.parametrize("model", params(DISTINCT))
def test_no_text_has_fewer_tokens_than_were_foreseen(model: Real) -> None:
    tokenizer = model.tokenizer
    words = st.one_of(st.sampled_from([*longest(model), *HOSTILE]), st.text(max_size=30))

    @given(st.lists(words, max_size=6).map("".join), st.integers(1, 40))
    def holds(text: str, times: int) -> None:
        assert tokenizer.least_tokens(text * times) <= len(tokenizer.encode(text * times, add_special=False))

    holds()


@pytest.mark.parametrize("model", params(model for model in DISTINCT if model.name not in UNKNOWN))
def test_a_million_letters_have_many_tokens(model: Real) -> None:
    assert model.tokenizer.least_tokens("qzxj" * 250_000) > 8_000
    assert model.tokenizer.least_tokens("7" * 1_000_000) > 30_000
    if model.name != "smollm2-135m":  # which leaves bytes out that it has no token for
        assert model.tokenizer.least_tokens("語" * 1_000_000) > 5_000
    assert model.tokenizer.least_tokens("Hello") <= 1


def test_where_an_encoder_may_leave_something_out_nothing_is_foreseen(make_folder: MakeFolder) -> None:
    library = sentencepiece_library(strip=False)
    assert Tokenizer.load(make_folder(library)).least_tokens("the" * 1000) > 0
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer.load(make_folder(library)).least_tokens("the" * 1000) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_so_it_is_with_real_ones(name: str) -> None:
    assert named(name).tokenizer.least_tokens("a" * 1_000_000) == 0


@pytest.mark.parametrize("name", ["llama-like", "gemma-like"])
def test_vocabularies_with_marks_for_white_space_have_a_floor_too(made: Load, name: str) -> None:
    tokenizer = made(name)
    assert tokenizer.least_tokens("the" * 1000) == 750  # of four letters, as <tool> is

    @given(st.lists(st.sampled_from(["▁", " ", "   ", "the", "é", "x", "</s>", "😀"]), max_size=20).map("".join))
    def holds(text: str) -> None:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))

    holds()
