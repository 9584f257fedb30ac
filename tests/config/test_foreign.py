"""Flags and variables of other servers: each is put as ours, accepted with a note, or refused in words."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.config import SETTINGS, Config, load_config
from ingot.config.foreign import CONVERSIONS, TABLE, ForeignRow, foreign_rows, read_table
from ingot.errors import ConfigError
from ingot.text.tool_formats.registry import FORMAT_NAMES, THINKING_NAMES


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def parse(line: str) -> argparse.Namespace:
    parser = CommandParser("serve", "")
    parser.add_argument("model", nargs="?")
    add_settings(parser)
    return parser.parse(line.split())


def settled(line: str) -> Config:
    return settings_from_arguments(parse(line))


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(line)
    return caught.value.message


def with_variables(variables: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Config:
    return load_config(flags or {}, variables, ambient=True)


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("--model org/name", "model", "org/name"),
        ("-m a.gguf", "model", "a.gguf"),
        ("-hf org/name:Q4_K_M", "model", "org/name:Q4_K_M"),
        ("--max-model-len 8k", "context", 8000),
        ("--max-model-len=8K", "context", 8192),
        ("--max-model-len auto", "context", None),
        ("--max_model_len 512", "context", 512),
        ("--max_sequences=4", "max_sequences", 4),
        ("--disable-model-downloads", "offline", True),
        ("-c 4096", "context", 4096),
        ("-c 0", "context", None),
        ("--max-num-seqs 8", "max_sequences", 8),
        ("-np 4", "max_sequences", 4),
        ("--max-num-seqs 256 --completion-batch-size 32", "max_sequences", 32),
        ("--gpu-memory-utilization 0.9", "memory", "90%"),
        ("--max-num-batched-tokens 2K", "prefill_chunk", 2048),
        ("-b 2048 -ub 512", "prefill_chunk", 512),
        ("--tool-call-parser minimax", "tool_format", "minimax-m2"),
        ("--tool-call-parser qwen3_coder", "tool_format", "qwen3-coder"),
        ("--tool-call-parser auto", "tool_format", None),
        ("--tool-call-parser minimax-m3", "tool_format", "minimax-m3"),
        ("--reasoning-parser deepseek_r1", "thinking_format", "think"),
        ("--reasoning-parser openai_gptoss", "thinking_format", None),
        ("--reasoning off", "thinking", "off"),
        ("--reasoning --offline", "thinking", "on"),
        ("--reasoning-budget -1", "thinking_budget", None),
        ("--no-thinking", "thinking", "off"),
        ('--chat-template-args {"a":1}', "default_chat_template_kwargs", {"a": 1}),
        ("--temp 0.5 --top-k 20", "override_generation_config", {"temperature": 0.5, "top_k": 20}),
        ("--n-predict 64", "max_tokens", 64),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--disable-prefix-cache", "prefix_cache", False),
        ("--enable-prefix-cache", "prefix_cache", True),
        ("--cache-memory-mb 512", "cache_memory", "512MiB"),
        ("--prompt-cache-bytes 4GB", "cache_memory", "4GB"),
        ("--ssd-cache-dir /tmp", "cache_dir", Path("/tmp")),
        ("-ctk q8_0 -ctv q4_0", "kv_codec", "affine8/affine4"),
        ("-ctk q8_0 -ctv q8_0", "kv_codec", "affine8"),
        ("-ctv q8_0", "kv_codec", "raw/affine8"),
        ("--kv-bits 4", "kv_codec", "affine4"),
        ("--kv-cache-quantization --kv-cache-quantization-bits 4", "cache_codec", "affine4"),
        ("--kv-cache-turboquant", "cache_codec", "k8v4"),
        ("--spec-type draft-mtp", "speculate", "mtp"),
        ("-md org/draft --draft-max 4", "speculate", "draft:org/draft"),
        (
            "--allowed-origins https://a.example https://b.example",
            "cors_origins",
            ("https://a.example", "https://b.example"),
        ),
        ("--timeout 30", "request_timeout_s", 30.0),
        ("-tp 2", "tensor_parallel_size", 2),
        ("--lora adapter", "adapter_path", Path("adapter")),
        ("--idle-unload-seconds 5 --sleep-idle-seconds 5", "idle_unload_seconds", 5.0),
        ("--max-model-len 4096 --context 4096", "context", 4096),
    ],
)
def test_a_flag_is_put_as_ours(line: str, setting: str, value: Any) -> None:
    namespace = parse(line)
    named = {"model": namespace.model} if namespace.model is not None else {}
    settings = settings_from_arguments(namespace).settings
    assert named.get(setting, getattr(settings, setting)) == value


@pytest.mark.parametrize(
    "line",
    [
        *("--continuous-batching", "--enable-auto-tool-choice", "--mllm", "--use-paged-cache", "--trust-remote-code"),
        *("--jinja", "-ngl 99", "-fa", "-fa on", "--flash-attn auto", "--no-context-shift", "--stream-interval 1"),
    ],
)
def test_what_ingot_always_does_is_accepted_with_a_line(line: str) -> None:
    config = settled(f"{line} here")
    [note] = config.notes
    assert note.startswith(line.split()[0]) and set(config.origins.values()) == {"default", "argument MODEL"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--enforce-eager", "leave it out"),
        ("-O3", "the device decides"),
        ("--compilation-config.mode 3", "the device decides"),
        ("--guided-decoding-backend xgrammar", "llguidance"),
        ("--mlock", "stay in memory"),
        ("--quantization awq", "ingot convert"),
        ("--data-parallel-size 2", "docs/scale.md"),
        ("-ngl 0", "cannot be kept off the device"),
        ("-fa off", "'off' cannot be honoured"),
        ("--no-jinja", "Jinja"),
        ("--no-continuous-batching", "it can only be switched on"),
        ("--stream-interval 4", "'4' cannot be honoured"),
        ("--allowed-origins *", "name those that may"),
        ("--gpu-memory-utilization 1.5", "write it like 0.9"),
        ("--kv-cache-dtype fp8", "affine8"),
        ("-ctk q5_1", "five bits"),
        ("--tool-call-parser mistrall", "mean mistral"),
        ("--max-model-len", "expected a value"),
        ("--max-model-len many", "not a whole number"),
        ("--context 8192 --max-model-len 4096", "--context and --max-model-len say different things"),
        ("-m a b", "-m and MODEL say different things"),
        ("--temp 0.5 --temperature 0.6", "say different things"),
        ("--temp hot", "not a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words(line: str, says: str) -> None:
    message = refusal(line)
    assert says in message and message.startswith(line.split()[0].partition("=")[0])


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("--max-modle-len 1", "--max-model-len"),
        ("--enable-prefix-cach", "--enable-prefix-cache"),
        ("--disable-prefix-cach", "--disable-prefix-cache"),
        ("--no-prefix-cach", "--no-prefix-cache"),
        ("--por 1", "--port"),
        ("--tool-format minimax", "minimax-m2"),
        ("--thinking-format minimax", "interleaved-think"),
    ],
)
def test_a_suggestion_says_what_was_meant(line: str, suggestion: str) -> None:
    assert f"id you mean {suggestion}?" in refusal(line)


def test_a_command_takes_only_flags_for_settings_that_it_has() -> None:
    parser = CommandParser("models", "")
    add_settings(parser, ("the rest",))
    with pytest.raises(ConfigError, match=r"--max-model-len \(--context here\) is for a command that runs a model"):
        parser.parse(["--max-model-len", "1"])


def test_what_follows_two_dashes_is_not_ours() -> None:
    assert parse("-- --max-model-len").model == "--max-model-len"


@pytest.mark.parametrize(
    ("variables", "setting", "value"),
    [
        ({"OLLAMA_HOST": "127.0.0.1:11434"}, "port", 11434),
        ({"OLLAMA_HOST": "http://localhost"}, "host", "localhost"),
        ({"OLLAMA_HOST": "[::1]:1"}, "host", "::1"),
        ({"OLLAMA_HOST": ":9000"}, "port", 9000),
        ({"OLLAMA_KEEP_ALIVE": "1h30m"}, "idle_unload_seconds", 5400.0),
        ({"OLLAMA_KEEP_ALIVE": "300"}, "idle_unload_seconds", 300.0),
        ({"OLLAMA_KEEP_ALIVE": "-1"}, "idle_unload_seconds", None),
        ({"OLLAMA_NUM_PARALLEL": "4"}, "max_sequences", 4),
        ({"OLLAMA_CONTEXT_LENGTH": "8192"}, "context", 8192),
        ({"OLLAMA_KV_CACHE_TYPE": "q8_0"}, "kv_codec", "affine8"),
        (
            {"OLLAMA_ORIGINS": "http://a.example,http://b.example"},
            "cors_origins",
            ("http://a.example", "http://b.example"),
        ),
        ({"OLLAMA_DEBUG": "1"}, "log_level", "debug"),
        ({"LLAMA_ARG_CTX_SIZE": "512"}, "context", 512),
        ({"OLLAMA_HOST": ":9000", "INGOT_PORT": "1"}, "port", 1),
        ({"OLLAMA_CONTEXT_LENGTH": "nonsense", "INGOT_CONTEXT": "512"}, "context", 512),
        ({"INGOT_MAX_MODEL_LEN": "512"}, "context", 512),
    ],
)
def test_variables_of_other_servers_count_where_nothing_else_is_said(
    variables: dict[str, str], setting: str, value: Any
) -> None:
    assert getattr(with_variables(variables).settings, setting) == value


def test_variables_of_other_servers_are_the_servers_alone() -> None:
    assert load_config({}, {"OLLAMA_CONTEXT_LENGTH": "nonsense"}).settings.context is None


def test_a_variable_that_ingot_has_nothing_for_is_a_line_and_no_error() -> None:
    config = with_variables({"OLLAMA_MAX_LOADED_MODELS": "1", "OLLAMA_FLASH_ATTENTION": "0", "OLLAMA_UNHEARD_OF": "1"})
    assert len(config.notes) == 2 and all("is not used" in note for note in config.notes)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OLLAMA_ORIGINS": "*"}, "OLLAMA_ORIGINS: .*Ollama"),
        ({"OLLAMA_HOST": "0.0.0.0"}, "OLLAMA_HOST: .*needs? an API key|OLLAMA_HOST: .*API key is needed"),
        ({"OLLAMA_KEEP_ALIVE": "soon"}, "not a duration"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error_that_names_it(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_variables(variables)


def test_the_table_is_read_only_when_a_foreign_name_is_met() -> None:
    read_table.cache_clear()
    settled("here --port 9000 --no-prefix-cache --tool-format hermes")
    assert read_table.cache_info().misses == 0
    settled("--jinja here")
    assert read_table.cache_info().misses == 1


ROWS = sorted({id(row): row for row in foreign_rows().values()}.values(), key=lambda row: row.names)


def test_no_name_is_twice_in_the_table() -> None:
    names = [name for row in read_table()[0] for name in row.names]
    assert len(names) == len(set(names)) == len(foreign_rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_a_row_says_all_that_it_has_to(row: ForeignRow) -> None:
    assert row.form in ("", *CONVERSIONS, *read_table()[1])
    assert row.note or row.does == "maps"
    if row.does == "maps":
        option = SETTINGS[row.to]
        values = [value for value in (row.on, row.off) if value is not None]
        values += [ours for ours in read_table()[1].get(row.form, {}).values() if ours and not ours.startswith("!")]
        for value in values:
            option.validate(value, row.names[0])
        assert (row.takes in ("value", "many")) or row.on is not None


def test_flags_that_are_the_same_are_ours() -> None:
    table = tomllib.loads(TABLE.read_text())
    ours = {"--config", *(option.flag for option in SETTINGS.values())}
    assert all(name in ours for deed in ("same", "other") for row in table[deed] for name in row["names"].split())


def test_every_parser_of_other_servers_is_a_format_of_ours() -> None:
    tables = read_table()[1]
    assert set(tables["tool_parsers"].values()) <= {"", *FORMAT_NAMES}
    assert set(tables["reasoning_parsers"].values()) <= {"", *THINKING_NAMES}
