from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.config import Settings
from ingot.errors import ConfigError, ModelError
from ingot.text.input_files import (
    SANE_SAMPLING,
    generation_config_problem,
    read_generation_config,
    read_prompts,
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_text_is_one_prompt_as_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, "system.txt", "You are\nkind.\n")
    assert [prompt.value for prompt in read_prompts(path)] == ["You are\nkind.\n"]


def test_lines_are_one_prompt_each_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '"one"\n\n[{"role": "user", "content": "hi"}]\n{"prompt": "three"}\n')
    found = read_prompts(path)
    assert [prompt.value for prompt in found] == ["one", [{"role": "user", "content": "hi"}], {"prompt": "three"}]
    assert found[2].place.endswith("p.jsonl, line 4")


def test_a_list_holds_prompts_and_an_object_alone_is_one(tmp_path: Path) -> None:
    several = written(tmp_path, "p.json", '["one", {"messages": [], "tools": []}]')
    assert len(read_prompts(several)) == 2
    assert read_prompts(several)[1].place.endswith("p.json, prompt 2")
    assert len(read_prompts(written(tmp_path, "q.json", '{"prompt": "one"}'))) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", '"fine"\n{"prompt": \n', "line 2: not valid JSON"),
        ("p.json", '["one",\n\n nope]', "line 3: not valid JSON"),
        ("p.json", "[1]", "prompt 1: a prompt is a text"),
        ("p.json", '[["hi"]]', "prompt 1: a list holds messages"),
        ("p.json", '[{"messages": [], "prompt": ""}]', "either 'messages' or 'prompt'"),
        ("p.json", "[{}]", "either 'messages' or 'prompt'"),
        ("p.json", '[""]', "prompt 1"),
        ("p.json", "[]", "holds no prompt"),
        ("p.txt", " \n", "holds no prompt"),
        ("p.json", "[" * 100_000, "p.json"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_prompts(written(tmp_path, name, text))
    assert words in found.value.message


def test_a_file_that_is_not_there_stops_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Settings(warm_prompts=tmp_path / "nothing.json")


def test_prompts_cannot_be_kept_warm_where_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache"):
        Settings(warm_prompts=written(tmp_path, "p.txt", "Be kind."), prefix_cache=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return tmp_path


def test_the_model_s_own_file_is_read_unless_the_setting_says_otherwise(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert read_generation_config("auto", folder) == {"temperature": 0.6}
    assert read_generation_config("auto", elsewhere) == SANE_SAMPLING
    assert read_generation_config(str(folder), elsewhere) == {"temperature": 0.6}
    assert read_generation_config("none", folder) == read_generation_config("vllm", folder) == {}


@pytest.mark.parametrize("stated", [{"do_sample": True}, {"do_sample": False}, {"top_k": 64}, {"min_p": 0.0}])
def test_ours_is_used_only_where_a_model_s_makers_state_no_sampling(folder: Path, stated: dict[str, Any]) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(stated | {"eos_token_id": 2}))
    assert read_generation_config("auto", folder) == stated | {"eos_token_id": 2}
    file.write_text('{"eos_token_id": 2, "temperature": null}')
    assert read_generation_config("auto", folder) == {"eos_token_id": 2, **SANE_SAMPLING}
    assert read_generation_config(str(folder), folder) == {"eos_token_id": 2, "temperature": None}


def test_a_broken_file_is_named(folder: Path) -> None:
    for broken in ("{", "[1]"):
        (folder / "generation_config.json").write_text(broken)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            read_generation_config("auto", folder)


def test_the_setting_is_a_word_or_a_folder_that_has_such_a_file(folder: Path, tmp_path: Path) -> None:
    for setting in ("auto", "none", "vllm", str(folder)):
        assert generation_config_problem(setting) is None
    assert "generation_config.json" in (generation_config_problem(str(tmp_path / "nowhere")) or "")
    assert generation_config_problem("off") is not None
