"""Mixtures that choose fewer experts for a token than their model says: everywhere alike, and only if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.errors import ConfigError
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.cache_key import kv_key
from tests import tiny
from tests.launches import prompt_logits

pytestmark = pytest.mark.usefixtures("rules")

PROMPT = [5, 17, 3, 29, 11, 23]


def saved(kind: str, folder: Path, **changed: Any) -> Path:
    """The same weights, whatever the config says of experts."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIGS[kind], **changed}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny.build(kind).parameters())))
    return folder


def loaded(folder: Path, experts: int | None = None) -> ModelAdapter:
    return load_model_adapter(folder, current_device(), widest=64, experts=experts)


def refusal(folder: Path, experts: int) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, experts)
    return caught.value.message


def test_it_computes_what_a_model_of_so_many_experts_computes(tmp_path: Path) -> None:
    usual, few = saved("moe", tmp_path / "usual"), saved("moe", tmp_path / "few", num_experts_per_tok=1)
    asked, same, whole = loaded(usual, 1), loaded(few), loaded(usual)
    first, second, third = (prompt_logits(adapter, PROMPT) for adapter in (asked, same, whole))
    assert mx.array_equal(first, second) and not mx.array_equal(first, third)
    assert (asked.lossy, whole.lossy) == (("1 of 2 experts a token",), ())


def test_its_kv_is_no_other_models(tmp_path: Path) -> None:
    folder, codec = saved("moe", tmp_path), PairCodec(CodecName.parse("raw"))
    assert kv_key(loaded(folder, 1), folder, codec) != kv_key(loaded(folder), folder, codec)


def test_it_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    assert "no mixture of experts" in refusal(saved("llama", tmp_path / "dense"), 1)
    assert "3 is more than the model's own 2" in refusal(saved("moe", tmp_path / "moe"), 3)
