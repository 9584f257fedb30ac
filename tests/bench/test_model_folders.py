from __future__ import annotations

import json
from pathlib import Path

from bench.model_folders import write
from ingot.models.files.progress import no_progress
from ingot.text.tokenizer.tokenizer import Tokenizer


def test_a_folder_for_measuring_names_no_token_that_ends_an_answer(tmp_path: Path) -> None:
    write("dispatch", tmp_path, no_progress)
    assert Tokenizer.load(tmp_path).eos_ids == frozenset()
    assert "eos_token_id" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "model.safetensors").exists()
