from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers

from ingot.errors import ModelError
from ingot.text.tokenizer import vocabulary
from ingot.text.tokens.growth import check_growth, growth

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


def table(*texts: bytes) -> dict[str, Any]:
    raw = (8).to_bytes(4, "little") + bytes(8) + b"\0".join(texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


@pytest.mark.parametrize(
    "step",
    [
        None,
        {"type": "NFKC"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Sequence", "normalizers": [table(b"ab", b"c" * 33), SPACES]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}] * 20},
        {"type": "Sequence", "normalizers": [SPACES, {"type": "Lowercase"}, DOUBLE]},
    ],
)
def test_what_real_tokenizers_do_is_taken(tmp_path: Path, step: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": step, "decoder": step, "model": {"vocab": {}}}))
    check_growth(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Sequence", "normalizers": [DOUBLE] * 30},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 5}] * 6},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000},
        {"type": "Prepend", "prepend": "x" * 1000},
        table(b"x" * 1000),
    ],
)
@pytest.mark.parametrize("name", ["normalizer", "decoder"])
def test_a_bomb_is_refused_by_its_file(tmp_path: Path, step: Any, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({name: step}))
    with pytest.raises(ModelError, match="times longer"):
        check_growth(tmp_path / "tokenizer.json")


def test_no_bomb_is_set_off_by_loading_it(tmp_path: Path) -> None:
    library = Library(models.BPE())
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 60)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="times longer"):
        vocabulary.load(tmp_path, {}, {})


def test_growth_is_at_least_what_the_library_does() -> None:
    step = normalizers.Sequence([normalizers.Replace("a", "aa"), normalizers.Prepend("aa")] * 3)
    made = json.loads(step.__getstate__())
    assert len(step.normalize_str("a")) <= growth(made)
