"""What other servers call our settings: read wherever settings are, put as ours, refused where they cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.config import SETTINGS, Config, load_config
from ingot.config.sources import flag_of_key
from ingot.engine.speculation.options import KNOWN_WORDS, SpeculationOptions
from ingot.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def settled(**flags: Any) -> Config:
    return load_config(
        {name: json.dumps(value) if isinstance(value, dict) else value for name, value in flags.items()}, {}
    )


def chosen(config: Config) -> SpeculationOptions:
    return SpeculationOptions.parse(config.settings.speculate, config.settings.speculate_tokens)


def refusal(**flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(**flags)
    return caught.value.message


def test_nothing_said_is_auto_and_as_many_tokens_as_pay() -> None:
    assert chosen(load_config({}, {})) == SpeculationOptions(None, {}, None)


def test_the_help_names_every_word() -> None:
    assert all(word in SETTINGS["speculate"].help for word in KNOWN_WORDS)


def test_a_wrong_word_is_refused_by_the_flag_with_those_that_exist() -> None:
    message = refusal(speculate="ngram")
    assert message.startswith("--speculate: ") and ", ".join(KNOWN_WORDS) in message


@pytest.mark.parametrize("tokens", ["0", "17"])
def test_tokens_are_bounded(tokens: str) -> None:
    assert refusal(speculate_tokens=tokens).startswith("--speculate-tokens")
    assert refusal(num_draft_tokens=tokens).startswith("--num-draft-tokens")
    assert refusal(mtp_num_draft_tokens=tokens).startswith("--mtp-num-draft-tokens")
    config = {"method": "mtp", "num_speculative_tokens": int(tokens)}
    assert refusal(speculative_config=config).startswith("--speculative-config")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_mtp": True}, "mtp"),
        ({"suffix_decoding": True}, "lookup"),
        ({"draft_model": "org/small:Q4_K_M"}, "draft:org/small:Q4_K_M"),
        ({"enable_mtp": True, "suffix_decoding": True}, "mtp,lookup"),
    ],
)
def test_the_lineages_flags_mean_words_of_ours(flags: dict[str, Any], words: str) -> None:
    config = settled(**flags)
    assert chosen(config) == SpeculationOptions.parse(words)
    assert config.origins["speculate"] == " and ".join(f"flag {flag_of_key(name)}" for name in flags)


@pytest.mark.parametrize("name", ["num_draft_tokens", "mtp_num_draft_tokens"])
def test_the_lineages_counts_are_ours(name: str) -> None:
    config = settled(**{name: "4"})
    assert chosen(config) == SpeculationOptions(None, {}, 4)
    assert config.origins["speculate_tokens"] == f"flag {flag_of_key(name)}"


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({"method": "mtp", "num_speculative_tokens": 3}, SpeculationOptions(("mtp",), {}, 3)),
        ({"method": "deepseek_mtp"}, SpeculationOptions(("mtp",))),
        ({"method": "qwen3_next_mtp", "model": None, "draft_tensor_parallel_size": 1}, SpeculationOptions(("mtp",))),
        ({"method": "ngram", "num_speculative_tokens": 5}, SpeculationOptions(("lookup",), {}, 5)),
        ({"method": "suffix"}, SpeculationOptions(("lookup",))),
        ({"method": "draft_model", "model": "a/b"}, SpeculationOptions(("draft",), {"draft": "a/b"})),
        ({"model": "a/b", "num_speculative_tokens": 1}, SpeculationOptions(("draft",), {"draft": "a/b"}, 1)),
        ({"method": "eagle3", "model": "a/b"}, SpeculationOptions(("eagle",), {"eagle": "a/b"})),
        ({"method": "dflash", "model": "a/b"}, SpeculationOptions(("draft",), {"draft": "a/b"})),
    ],
)
def test_vllms_form_means_words_of_ours(config: dict[str, Any], choice: SpeculationOptions) -> None:
    assert chosen(settled(speculative_config=config)) == choice


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "neither a 'method' nor a 'model'"),
        ({"method": "medusa"}, "'medusa' is not known; known are mtp, ngram, suffix, draft_model, eagle3"),
        ({"method": 3}, "'method' must be the name of a method"),
        ({"method": "mtp", "model": "a/b"}, "takes no 'model'"),
        ({"method": "eagle3"}, "needs a 'model'"),
        ({"method": "draft_model", "model": "a,b"}, "comma"),
        ({"method": "draft_model", "model": ["a"]}, "the name of a model"),
        ({"method": "ngram", "prompt_lookup_max": 4}, "'prompt_lookup_max' is not supported"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "'suffix_decoding_max_tree_depth' is not"),
        ({"method": "mtp", "disable_by_batch_size": 8}, "'disable_by_batch_size' is not supported"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "'draft_tensor_parallel_size' is not supported"),
        ({"method": ["mtp"]}, "'method' must be the name of a method"),
        ({"method": ""}, "'method' must be the name of a method"),
        ({"method": "nonmtp"}, "'nonmtp' is not known"),
        ({"method": "mtp", "temperature": 1}, "'temperature' is not known; known are method, model, num_spec"),
        ({"method": "mtp", "num_speculative_tokens": "3"}, "is not a whole number"),
        ({"method": "mtp", "num_speculative_tokens": True}, "is not a whole number"),
    ],
)
def test_what_vllms_form_says_is_honoured_or_refused_by_name(config: dict[str, Any], says: str) -> None:
    message = refusal(speculative_config=config)
    assert message.startswith("--speculative-config: ") and says in message


@given(st.dictionaries(st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text(max_size=8)))
def test_no_json_makes_vllms_form_fail_otherwise_than_in_words(config: dict[str, Any]) -> None:
    try:
        assert chosen(settled(speculative_config=config)).names
    except ConfigError as error:
        assert error.message.startswith("--speculative-config")


@pytest.mark.parametrize(
    "flags",
    [
        {"speculate": "lookup", "enable_mtp": True},
        {"speculate": "auto", "draft_model": "a/b"},
        {"speculate_tokens": "3", "num_draft_tokens": "4"},
        {"mtp_num_draft_tokens": "2", "num_draft_tokens": "3"},
        {"speculate_tokens": "3", "speculative_config": {"method": "mtp", "num_speculative_tokens": 4}},
        {"turbo_kv_bits": "3", "kv_cache_quantization": True},
        {"cache_codec": "k8v4", "turbo_kv_bits": "4"},
        {"kv_codec": "k8v4", "kv_cache_dtype": "turboquant_4bit_nc"},
    ],
)
def test_two_names_that_say_different_things_are_refused_with_both(flags: dict[str, Any]) -> None:
    message = refusal(**flags)
    assert all(flag_of_key(name) in message for name in flags)
    assert "give one of them" in message


def test_a_flag_in_any_words_beats_the_file_in_any_words(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('speculate = "lookup"\nnum_draft_tokens = 2')
    config = load_config({"enable_mtp": True}, {"INGOT_SPECULATE_TOKENS": "5"}, path)
    assert chosen(config) == SpeculationOptions(("mtp",), {}, 5)
    assert chosen(load_config({"speculate": "off"}, {"INGOT_DRAFT_MODEL": "a/b"}, path)).names == ()


def test_variables_and_the_file_know_them_too(tmp_path: Path) -> None:
    assert chosen(load_config({}, {"INGOT_ENABLE_MTP": "true"})).names == ("mtp",)
    assert chosen(load_config({}, {"INGOT_SPECULATIVE_CONFIG": '{"method": "ngram"}'})).names == ("lookup",)
    path = tmp_path / "x.toml"
    path.write_text('speculative_config = {method = "mtp", num_speculative_tokens = 2}')
    assert chosen(load_config({}, {}, path)) == SpeculationOptions(("mtp",), {}, 2)
    with pytest.raises(ConfigError, match="did you mean INGOT_ENABLE_MTP"):
        load_config({}, {"INGOT_ENABLE_MPT": "1"})


def test_what_only_switches_on_cannot_be_switched_off() -> None:
    with pytest.raises(ConfigError, match="INGOT_ENABLE_MTP: it can only be switched on"):
        load_config({}, {"INGOT_ENABLE_MTP": "false"})


def test_an_empty_variable_says_nothing() -> None:
    assert chosen(load_config({"speculate": "mtp"}, {"INGOT_DRAFT_MODEL": ""})).names == ("mtp",)


@pytest.mark.parametrize(
    ("flags", "codec"),
    [({"turbo_kv_bits": "3"}, "turbo3"), ({"kv_cache_quantization": True}, "affine8"), ({}, "raw")],
)
def test_the_lineages_codecs_are_ours(flags: dict[str, Any], codec: str) -> None:
    assert settled(**flags).settings.cache_codec == codec


@pytest.mark.parametrize("bits", ["0", "5", "8"])
def test_bits_that_no_codec_has_are_refused(bits: str) -> None:
    assert refusal(turbo_kv_bits=bits).startswith("--turbo-kv-bits")


@pytest.mark.parametrize(
    ("dtype", "codec"), [("auto", "raw"), ("int8_per_token_head", "affine8"), ("turboquant_k3v4_nc", "turbo3/turbo4")]
)
def test_what_vllm_keeps_live_states_in_is_a_live_codec(dtype: str, codec: str) -> None:
    settings = settled(kv_cache_dtype=dtype).settings
    assert (settings.kv_codec, settings.cache_codec) == (codec, "raw")


@pytest.mark.parametrize(("dtype", "hint"), [("fp8_e4m3", "affine8"), ("bfloat16", "auto"), ("nvfp4", "not known")])
def test_numbers_that_no_live_codec_has_are_refused(dtype: str, hint: str) -> None:
    message = refusal(kv_cache_dtype=dtype)
    assert message.startswith("--kv-cache-dtype") and hint in message


def test_vllms_words_say_where_events_are_told() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": "tcp://*:5558", "topic": "kv"}
    settings = load_config({"kv_events_config": json.dumps(config)}, {}).settings
    assert (settings.kv_events, settings.kv_events_replay) == ("tcp://*:5557", "tcp://*:5558")
    assert settings.kv_events_topic == "kv"


@pytest.mark.parametrize("config", [{}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_events_that_are_not_asked_for_are_not_told(config: dict[str, Any]) -> None:
    assert load_config({"kv_events_config": json.dumps(config)}, {}).settings.kv_events is None


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"buffer_steps": 5}, "buffer_steps"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "kafka"),
        ({"enable_kv_cache_events": 1}, "true or false"),
        ({"enable_kv_cache_events": True, "endpoint": "5557"}, "tcp://HOST:PORT"),
    ],
)
def test_what_cannot_be_honoured_of_events_is_named(config: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config({"kv_events_config": json.dumps(config)}, {})
