"""What a model is for, by its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.config import Settings
from ingot.models.files.kinds import kind_in, kind_of


def folder(path: Path, config: Any, *further: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in further:
        (path / name).write_text("[]")
    return path


@pytest.mark.parametrize(
    ("config", "further", "kind"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, (), "chat"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ("modules.json",), "embedding"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, (), "embedding"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, (), "embedding"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, ("modules.json",), "rerank"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, (), "audio"),
        ({"model_type": "llama"}, (), "chat"),
        ({"architectures": "nonsense"}, (), "chat"),
        ("nonsense", (), "chat"),
    ],
)
def test_a_folder_says_what_its_model_is_for(tmp_path: Path, config: Any, further: Any, kind: str) -> None:
    assert kind_in(folder(tmp_path, config, *further)) == kind


def test_a_folder_without_a_config_is_left_to_who_loads_it(tmp_path: Path) -> None:
    assert kind_in(tmp_path) == "chat"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("smollm2-135m", "chat"),
        ("all-MiniLM-L6-v2", "embedding"),
        ("whisper-tiny.en", "audio"),
        ("nobody/knows-it", "chat"),
        ("nobody knows it", "chat"),
    ],
)
def test_a_name_says_it_before_anything_is_fetched(name: str, kind: str, tmp_path: Path) -> None:
    assert kind_of(name, Settings(models_dir=tmp_path)) == kind


def test_a_path_says_it_by_what_lies_there(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", {"model_type": "whisper"})
    assert kind_of(str(model), Settings(models_dir=tmp_path)) == "audio"
