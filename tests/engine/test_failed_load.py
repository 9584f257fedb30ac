"""A model that cannot be loaded ends in words, not in an abort when the process exits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.random_models import write_tokenizer
from ingot.config.settings import Settings
from ingot.engine.loading.language_model import start_engine
from ingot.errors import ModelError
from tests import tiny
from tests.processes import ROOT, run


def test_a_server_whose_model_cannot_be_loaded_says_so_and_exits_in_peace(tmp_path: Path) -> None:
    weights = dict(tree_flatten(tiny.build("llama").parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {k: v for k, v in weights.items() if ".mlp." not in k})
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["llama"]))
    write_tokenizer(tmp_path, tiny.VOCAB)
    command = [sys.executable, "-m", "ingot", "serve", str(tmp_path), "--port", "0"]
    done = run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot be loaded" in done.stderr and "terminate called" not in done.stderr


def test_a_model_whose_template_cannot_render_a_plain_question_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["llama"]))
    write_tokenizer(tmp_path, tiny.VOCAB)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content.encode() }}")
    with pytest.raises(ModelError, match=r"cannot render a plain question: .*it calls 'encode'.*--chat-template"):
        start_engine(Settings(), tmp_path, name="tiny", source="here")
