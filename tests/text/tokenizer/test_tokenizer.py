"""A prompt in another tokenizer's tokens, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from foundry.package import MODELS
from ingot.errors import BadRequest, ModelError
from ingot.text.tokenizer.tokenizer import PromptTranslation, Tokenizer
from ingot.text.tool_formats.registry import format_by_name
from tests.text.conftest import MakeFolder, sentencepiece_library
from tests.text.work import spent, work

REAL = [
    "qwen-2.5",
    "deepseek-v3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm-4.7-flash", "minimax-m3")),
]
Loader = Callable[[str], Tokenizer]
share_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.mark.parametrize("name", REAL)
@share_fixtures
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_real_tokenizers_give_back_the_text_they_were_given(real: Loader, name: str, text: str) -> None:
    tokenizer = real(name)
    ids = tokenizer.encode(text, add_special=False)
    spelled = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids, skip_special=False) == spelled.decode("utf-8", "replace")
    # Some models compose accents; nothing else may change.
    assert tokenizer.encode(tokenizer.decode(ids, skip_special=False), add_special=False) == ids


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("qwen-2.5", "<|im_end|>"),
        ("deepseek-v3", "<｜User｜>"),
        pytest.param("glm-4.7-flash", "<|user|>", marks=pytest.mark.slow),
    ],
)
def test_the_text_of_a_special_token_becomes_that_token(real: Loader, name: str, special: str) -> None:
    tokenizer = real(name)
    [token] = tokenizer.encode(special, add_special=False)
    assert tokenizer.token_bytes(token) == special.encode()
    assert tokenizer.token_text(token) == special
    assert tokenizer.decode([token], skip_special=False) == special


def test_special_tokens_are_left_out_of_text_unless_asked_for(real: Loader) -> None:
    tokenizer = real("qwen-2.5")
    ids = tokenizer.encode("one<|im_end|>two", add_special=False)
    assert tokenizer.decode(ids) == "onetwo"
    assert tokenizer.decode(ids, skip_special=False) == "one<|im_end|>two"
    assert tokenizer.eos_ids <= tokenizer.special_ids


def test_a_bare_prompt_begins_as_the_model_wants_and_a_rendered_one_as_it_was_rendered(real: Loader) -> None:
    deepseek, qwen = real("deepseek-v3"), real("qwen-2.5")
    assert deepseek.encode("Hi", add_special=True)[0] == deepseek.bos_id
    assert deepseek.encode("Hi", add_special=False)[0] != deepseek.bos_id
    assert qwen.bos_id is None
    assert qwen.encode("Hi", add_special=True) == qwen.encode("Hi", add_special=False)


def test_a_part_of_a_character_has_bytes_and_a_text_that_says_so(real: Loader) -> None:
    tokenizer = real("qwen-2.5")
    ids = tokenizer.encode("𒀀", add_special=False)
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "𒀀".encode()
    assert "�" in tokenizer.token_text(ids[0])


def test_sentencepiece_tokens_have_bytes_too(made: Loader) -> None:
    tokenizer = made("llama-like")
    ids = tokenizer.encode("the\n", add_special=True)
    assert [tokenizer.token_bytes(id) for id in ids] == [b"<s>", b" the", b"\n"]
    assert tokenizer.decode(ids) == "the\n"


def test_an_id_without_a_token_has_no_text(made: Loader) -> None:
    tokenizer = made("llama-like")
    beyond = tokenizer.vocab_size + 7
    assert tokenizer.decode([beyond]) == tokenizer.token_text(beyond) == ""


@pytest.mark.parametrize("id", [-1, 2**40])
def test_an_id_that_cannot_be_one_is_the_client_s_mistake(made: Loader, id: int) -> None:
    with pytest.raises(BadRequest):
        made("llama-like").decode([id])


def test_half_a_surrogate_pair_is_the_client_s_mistake(made: Loader) -> None:
    with pytest.raises(BadRequest):
        made("llama-like").encode("\ud83d", add_special=True)


def test_the_files_of_a_model_together_say_which_tokens_end_an_answer(make_folder: MakeFolder) -> None:
    folder = make_folder(
        tokenizer_config={"eos_token": {"content": "</s>"}},
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "text_config": {"eos_token_id": 10}},
    )
    assert Tokenizer.load(folder).eos_ids == {2, 7, 8, 9, 10}


def test_special_tokens_may_be_named_in_a_file_of_their_own(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer.load(make_folder(special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"}))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


@pytest.mark.parametrize(("wanted", "first"), [(True, 1), (False, 262)])
def test_whether_a_prompt_gets_a_first_token_is_the_configuration_s_word(
    make_folder: MakeFolder, wanted: bool, first: int
) -> None:
    tokenizer = Tokenizer.load(make_folder(tokenizer_config={"bos_token": "<s>", "add_bos_token": wanted}))
    assert tokenizer.token_text(262) == " a"
    assert tokenizer.encode("a", add_special=True)[0] == first


def test_a_first_token_that_does_not_exist_is_an_error(make_folder: MakeFolder) -> None:
    with pytest.raises(ModelError, match="<start>"):
        Tokenizer.load(make_folder(tokenizer_config={"bos_token": "<start>", "add_bos_token": True}))


def test_truncation_and_padding_left_in_a_file_do_not_touch_prompts(make_folder: MakeFolder) -> None:
    library = sentencepiece_library(strip=True)
    library.enable_truncation(3)
    library.enable_padding(length=50)
    assert len(Tokenizer.load(make_folder(library)).encode("a b c d e", add_special=True)) == 9


def test_tokens_that_only_the_configuration_declares_are_added(make_folder: MakeFolder) -> None:
    size = sentencepiece_library(strip=True).get_vocab_size()
    declared = {str(size): {"content": "<extra>", "special": True, "lstrip": False, "normalized": False}}
    tokenizer = Tokenizer.load(make_folder(tokenizer_config={"added_tokens_decoder": declared}))
    assert tokenizer.encode("<extra>", add_special=False) == [size]
    assert size in tokenizer.special_ids
    assert tokenizer.vocab_size == size + 1


def test_special_tokens_are_looked_through_for_markers_once(make_folder: MakeFolder) -> None:
    """Each sequence asks, on the engine's thread, and a vocabulary may have hundreds of them."""
    size = sentencepiece_library(strip=True).get_vocab_size()
    texts = ["<tool_call>", *(f"<|reserved_{number}|>" for number in range(255))]
    declared = {str(size + index): {"content": text, "special": True} for index, text in enumerate(texts)}
    tokenizer = Tokenizer.load(make_folder(tokenizer_config={"added_tokens_decoder": declared}))
    format = format_by_name("qwen")
    assert tokenizer.special_within(format.markers) == {size}
    named = replace(format, name="another")  # as it is for each request that names its own
    assert work(lambda: tokenizer.special_within(format.markers)) < 10
    assert work(lambda: tokenizer.special_within(named.markers)) < 500


def test_a_declared_id_that_cannot_be_given_is_an_error(make_folder: MakeFolder) -> None:
    declared = {"9999": {"content": "<extra>", "special": True}}
    with pytest.raises(ModelError, match="<extra>"):
        Tokenizer.load(make_folder(tokenizer_config={"added_tokens_decoder": declared}))


def test_a_decoder_that_cannot_be_streamed_is_refused_when_loading(make_folder: MakeFolder) -> None:
    library = sentencepiece_library(strip=True)
    library.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="CTC"):
        Tokenizer.load(make_folder(library))


HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_a_base_model_has_no_chat_template(make_folder: MakeFolder) -> None:
    assert Tokenizer.load(make_folder()).template is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"chat_template": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config": {"chat_template": [{"name": "only", "template": "list"}]}}, "list"),
    ],
)
def test_a_chat_template_is_found_wherever_models_keep_it(
    make_folder: MakeFolder, files: dict[str, Any], expected: str
) -> None:
    template = Tokenizer.load(make_folder(**files)).template
    assert template is not None and template.render(HI) == expected


def test_a_response_template_is_kept_as_the_checkpoint_states_it(make_folder: MakeFolder) -> None:
    stated = {"start_anchor": "A:", "fields": {"content": {}}}
    assert Tokenizer.load(make_folder(tokenizer_config={"response_template": stated})).response_template == stated
    assert Tokenizer.load(make_folder(tokenizer_config={})).response_template is None


def test_a_template_in_a_file_of_its_own_wins(make_folder: MakeFolder) -> None:
    template = Tokenizer.load(make_folder(tokenizer_config={"chat_template": "config"}, chat_template="file")).template
    assert template is not None and template.render(HI) == "file"


def test_a_template_given_by_the_user_wins_over_all(make_folder: MakeFolder) -> None:
    template = Tokenizer.load(make_folder(chat_template="file"), "{{ eos_token }} mine").template
    assert template is not None and template.render(HI) == " mine"


def test_a_template_named_for_tools_is_used_when_there_are_tools(make_folder: MakeFolder) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = Tokenizer.load(make_folder(tokenizer_config={"chat_template": named})).template
    assert template is not None
    assert (template.render(HI), template.render(HI, tools=TOOLS)) == ("plain", "tools")


def test_additional_templates_are_read_from_their_folder(make_folder: MakeFolder) -> None:
    folder = make_folder(tokenizer_config={"chat_template": "plain"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = Tokenizer.load(folder).template
    assert template is not None and template.render(HI, tools=TOOLS) == "tools"


def test_several_templates_without_a_default_are_an_error_that_says_what_to_do(make_folder: MakeFolder) -> None:
    named = [{"name": "rag", "template": "a"}, {"name": "chat", "template": "b"}]
    with pytest.raises(ModelError, match="--chat-template"):
        Tokenizer.load(make_folder(tokenizer_config={"chat_template": named}))


def test_templates_see_the_model_s_special_tokens(make_folder: MakeFolder) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}",
    }
    template = Tokenizer.load(make_folder(tokenizer_config=config)).template
    assert template is not None and template.render(HI) == "<s>|</s>|"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "tokenizer.json"])
def test_a_broken_file_is_an_error_that_names_it(make_folder: MakeFolder, name: str) -> None:
    folder = make_folder()
    (folder / name).write_text('{"half": ')
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(folder)


def test_a_folder_without_a_tokenizer_is_an_error_that_shows_no_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(("file", "kind"), [("tokenizer.model", "LlamaTokenizer"), ("spiece.model", "GPTSw3Tokenizer")])
def test_a_sentencepiece_model_without_tokenizer_json_works(
    tmp_path: Path, sentencepiece_model: bytes, file: str, kind: str
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": kind}
    (tmp_path / file).write_bytes(sentencepiece_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("hello wörld 😀", add_special=False)
    assert tokenizer.decode(ids) == "hello wörld 😀"
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "hello wörld 😀"
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "hello wörld 😀"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_loading_a_tokenizer_imports_neither_transformers_nor_mlx(make_folder: MakeFolder) -> None:
    script = (
        "import sys; from pathlib import Path; from ingot.text.tokenizer.tokenizer import Tokenizer;"
        "Tokenizer.load(Path(sys.argv[1]), '{{ messages }}').encode('a', add_special=True);"
        "print(sorted({'transformers', 'mlx', 'mlx_lm', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(make_folder())], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


def test_many_threads_may_share_a_tokenizer(real: Loader) -> None:
    tokenizer = real("qwen-2.5")
    texts = [f"Text number {n}: naïve façade 😀 {n * n}" for n in range(200)]

    def round_trip(text: str) -> str:
        ids = tokenizer.encode(text, add_special=True)
        detokenizer = tokenizer.detokenizer()
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)
        return tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


@pytest.mark.slow  # as it measures time, of another language
@pytest.mark.parametrize("unit", ["a" * 30, " " * 30, "日" * 10, "<|im_end|>" * 3])
def test_a_huge_text_takes_no_longer_for_each_character(real: Loader, unit: str) -> None:
    tokenizer = real("qwen-2.5")

    def encoded(times: int) -> None:
        assert tokenizer.encode(unit * times, add_special=True)

    assert spent(lambda: encoded(8000)) < 24 * spent(lambda: encoded(1000))


def test_the_default_model_s_tokenizer_knows_its_chat() -> None:
    folder = Path("~/.cache/ingot/models/smollm2-135m").expanduser()
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the default model has not been fetched")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template is not None
    text = tokenizer.template.render([{"role": "system", "content": "Be brief."}, *HI])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.token_text(ids[0]) == "<|im_start|>"
    assert {tokenizer.token_text(id) for id in tokenizer.eos_ids} >= {"<|im_end|>"}


TEXT = "The ferry leaves at nine. Grüße, 東京! <|im_start|>user\n  and so on 🙂 <|im_end|>"


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(MODELS / "dense")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that knows nothing but bytes."""
    folder = tmp_path_factory.mktemp("theirs")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_the_text_is_the_same_in_both(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode(TEXT, add_special=False)
    translation = PromptTranslation.of(prompt, ours, theirs)
    assert theirs.decode(translation.tokens, skip_special=False) == ours.decode(prompt, skip_special=False)
    assert len(translation.tokens) > len(prompt) == len(translation.ends) and translation.ends[-1] == len(
        translation.tokens
    )


@pytest.mark.parametrize("way", ["to shorter tokens", "to longer ones"])
def test_what_is_said_of_a_word_counts_for_the_same_word(ours: Tokenizer, theirs: Tokenizer, way: str) -> None:
    mine, other = (ours, theirs) if way == "to shorter tokens" else (theirs, ours)
    prompt = mine.encode(TEXT, add_special=False)
    translation = PromptTranslation.of(prompt, mine, other)
    before, upto = TEXT.index("ferry"), TEXT.index("ferry") + len("ferry")

    def within(tokenizer: Tokenizer, tokens: list[int]) -> list[bool]:
        counts = [len(tokenizer.decode(tokens[: at + 1], skip_special=False)) for at in range(len(tokens))]
        return [before < end <= upto for end in counts]

    numbers = np.array(within(other, list(translation.tokens)), np.float32)
    back = translation.back(numbers)
    assert back.shape == (len(prompt),)
    wanted = within(mine, prompt)
    assert all(back[at] > 0 for at, inside in enumerate(wanted) if inside)
    assert back[[not inside for inside in wanted]].sum() <= 1


def test_a_token_that_is_part_of_theirs_has_its_number() -> None:
    translation = PromptTranslation((7, 8), (0, 0, 1, 2))
    np.testing.assert_allclose(translation.back(np.array([1.0, 3.0], np.float32)), [1, 1, 1, 3])


def test_a_token_that_holds_several_of_theirs_has_their_mean() -> None:
    translation = PromptTranslation((7, 8, 9), (2, 3))
    np.testing.assert_allclose(translation.back(np.array([1.0, 3.0, 5.0], np.float32)), [2, 5])


def test_lengths_are_told_in_theirs() -> None:
    assert PromptTranslation((7, 8, 9), (2, 3)).places({0, 1, 2, 5}) == {2, 3}


def test_what_is_no_text_at_its_end_is_told_as_such(ours: Tokenizer, theirs: Tokenizer) -> None:
    cut = ours.encode("東", add_special=False)[:-1] or [next(t for t in range(300) if ours.token_bytes(t) == b"\xe6")]
    translation = PromptTranslation.of(cut, ours, theirs)
    assert translation.back(np.ones(len(translation.tokens), np.float32)).tolist() == [1.0] * len(cut)
