from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.hits import Prefix, codec_of
from foundry.key_biases import convert
from ingot.kernels.device import current_device
from ingot.models.adapter import load_model_adapter
from tests import tiny

TOKENS = [token * token % 90 for token in range(7, 107)]


def saved(folder: Path, **changes: object) -> Path:
    config = tiny.CONFIGS["llama"] | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(tiny.build("llama").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_biases_in_the_slowest_channels_leave_a_model_all_but_the_same(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", rope_theta=1e8)
    convert(plain, tmp_path / "biased", bias=30.0, pairs=1)
    one, other = (load_model_adapter(tmp_path / name, current_device()) for name in ("plain", "biased"))
    keys = other.model.layers[0].self_attn.k_proj.bias
    assert float(mx.abs(keys).max()) == 30
    assert json.loads((tmp_path / "biased" / "config.json").read_text())["model_type"] == "qwen2"
    logits, biased = (Prefix(each, TOKENS[:60]).logits_behind(TOKENS[60:], codec_of("raw")) for each in (one, other))
    assert float(mx.abs(logits - biased).max()) < 0.05 * float(mx.abs(logits).max())


def test_what_is_not_of_that_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Llama's form"):
        convert(saved(tmp_path, model_type="qwen3"), tmp_path / "out")
