"""Whether two models mean the same by a token's number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundry.package import MODELS
from ingot.engine.speculation.same_tokens import check_tokenizers
from ingot.errors import ConfigError


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with the draft's tokenizer, to be changed."""
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_text((MODELS / "draft" / file).read_text())
    return tmp_path


def change(folder: Path, changed: Any) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    changed(description)
    (folder / "tokenizer.json").write_text(json.dumps(description))


def test_models_of_the_same_tokenizer_go_together(other: Path) -> None:
    check_tokenizers(MODELS / "dense", MODELS / "draft")
    check_tokenizers(MODELS / "dense", other)


def test_a_token_of_another_text_is_named(other: Path) -> None:
    def swap(description: dict[str, Any]) -> None:
        names = {id: name for name, id in description["model"]["vocab"].items()}
        description["model"]["vocab"][names[100]], description["model"]["vocab"][names[101]] = 101, 100

    change(other, swap)
    with pytest.raises(ConfigError, match=r"token 100 is .*, the draft's is .* Choose a draft of the same family"):
        check_tokenizers(MODELS / "dense", other)


def test_more_tokens_are_named(other: Path) -> None:
    def add(description: dict[str, Any]) -> None:
        last = description["added_tokens"][-1]
        description["added_tokens"].append({**last, "id": 4096, "content": "<|another|>"})

    change(other, add)
    with pytest.raises(ConfigError, match="4096 tokens, the draft's has 4097"):
        check_tokenizers(MODELS / "dense", other)
