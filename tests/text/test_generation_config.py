from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.errors import ModelError
from ingot.text.tokens.generation_config import generation_config, setting_problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return tmp_path


def test_the_model_s_own_file_is_read_unless_the_setting_says_otherwise(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert generation_config("auto", folder) == {"temperature": 0.6}
    assert generation_config("auto", elsewhere) == {}
    assert generation_config(str(folder), elsewhere) == {"temperature": 0.6}
    assert generation_config("none", folder) == generation_config("vllm", folder) == {}


def test_a_broken_file_is_named(folder: Path) -> None:
    for broken in ("{", "[1]"):
        (folder / "generation_config.json").write_text(broken)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            generation_config("auto", folder)


def test_the_setting_is_a_word_or_a_folder_that_has_such_a_file(folder: Path, tmp_path: Path) -> None:
    for setting in ("auto", "none", "vllm", str(folder)):
        assert setting_problem(setting) is None
    assert "generation_config.json" in (setting_problem(str(tmp_path / "nowhere")) or "")
    assert setting_problem("off") is not None
