"""Mixtures whose experts are read when they are needed give the same bits as with all of them in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.experts.loading import ExpertMemory
from ingot.models.experts.streaming import ExpertStore
from ingot.upstream import SwitchLinear
from tests.launches import computed, decoded, prompt_logits
from tests.models.layers import family_configs
from tests.one_path import one_path

__all__ = ["one_path"]
pytestmark = pytest.mark.usefixtures("rules")

EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
PACKINGS = {
    "32 bits": None,
    "4 bits": {"group_size": 32, "bits": 4},
    "8 bits": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
CASES = [
    *(("qwen3_moe", packing) for packing in PACKINGS),
    *(("qwen3_5_moe", "4 bits"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "4 bits"), ("glm4_moe", "32 bits")),
    *(("nemotron_h", "8 bits"), ("mixtral", "4 bits"), ("olmoe", "32 bits")),
]
PROMPT = [5, 17, 3, 29, 11, 23, 7, 19, 2, 31, 41, 43]


def saved(family: str, folder: Path, packing: dict[str, Any] | None = None) -> Path:
    config = {**family_configs.config(family)}
    (config.get("text_config") or config).update({**EXPERTS, **WIDE})
    module = family_configs.import_upstream(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    routers = [(path, array) for path, array in tree_flatten(model.parameters()) if "gate.weight" in path]
    model.update(tree_unflatten([(path, mx.random.normal(array.shape)) for path, array in routers]))
    if packing is not None:
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, **packing, class_predicate=lambda path, each: isinstance(each, SwitchLinear))
        config["quantization"] = packing
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def loaded(folder: Path, share: float | None = None, **options: Any) -> ModelAdapter:
    memory = None if share is None else ExpertMemory(lambda others, experts: int(experts * share), **options)
    return load_model_adapter(folder, current_device(), widest=64, expert_memory=memory)


def reference(folder: Path, rules: str) -> ModelAdapter:
    """With all experts in memory. On CUDA they would be part of decode graphs, whose sums have another order."""
    return loaded(folder, 2.0, always=True) if rules == "cuda" else loaded(folder)


def store_of(adapter: ModelAdapter) -> ExpertStore:
    assert adapter.experts is not None
    return adapter.experts


def all_logits(adapter: ModelAdapter) -> list[mx.array]:
    """Of a prompt, of decode steps of two rows, and of the prompt again."""
    rows = adapter.new_batch_state()
    live = [rows.new(), rows.new()]
    found = [computed(adapter, rows, row, PROMPT[:count]) for row, count in zip(live, (12, 5), strict=True)]
    for step in range(3):
        batches = [live] if adapter.ragged else [[row] for row in live]
        found += [decoded(adapter, rows, batch, [step + 5 + 3 * i for i, _ in enumerate(batch)]) for batch in batches]
    return [*found, prompt_logits(adapter, PROMPT)]


@pytest.mark.parametrize(("family", "packing"), CASES)
def test_answers_are_those_of_the_model_in_memory(family: str, packing: str, rules: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path, PACKINGS[packing])
    whole = all_logits(reference(folder, rules))
    for share in (0.4, 0.7):
        adapter = loaded(folder, share)
        assert all(mx.array_equal(*pair) for pair in zip(all_logits(adapter), whole, strict=True))
        store = store_of(adapter)
        store.check()
        assert store.stats.misses and store.stats.bytes_read
        adapter.close()
