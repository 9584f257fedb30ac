"""Small mixtures of random weights, on disk and loaded with room for some of their experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.experts.loading import ExpertMemory
from ingot.models.experts.streaming import ExpertStore
from ingot.upstream import SwitchLinear
from tests.models.layers import family_configs

EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
IN_GRAPHS = {"head_dim": 16}
"""What decode graphs have kernels for."""
OUTPUTS = ("o_proj.weight", "down_proj.weight")
PACKINGS = {
    "32 bits": None,
    "4 bits": {"group_size": 32, "bits": 4},
    "8 bits": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
LOADED: list[ModelAdapter] = []
"""What the tests of a file loaded, whose threads end with the file."""
PROMPT = [5, 17, 3, 29, 11, 23, 7, 19, 2, 31, 41, 43]


def saved(
    family: str, folder: Path, packing: dict[str, Any] | None = None, *, calm: bool = False, **changed: Any
) -> Path:
    """With random weights. Those of a `calm` model hardly change what is handed from layer to layer."""
    config = {**family_configs.config(family)}
    (config.get("text_config") or config).update({**EXPERTS, **WIDE, **changed})
    module = family_configs.import_upstream(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    routers = [(path, array) for path, array in tree_flatten(model.parameters()) if "gate.weight" in path]
    model.update(tree_unflatten([(path, mx.random.normal(array.shape)) for path, array in routers]))
    if calm:
        outputs = [(path, array) for path, array in tree_flatten(model.parameters()) if path.endswith(OUTPUTS)]
        model.update(tree_unflatten([(path, array * 1e-3) for path, array in outputs]))
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
    adapter = load_model_adapter(folder, current_device(), widest=64, expert_memory=memory)
    LOADED.append(adapter)
    return adapter


def store_of(adapter: ModelAdapter) -> ExpertStore:
    assert adapter.experts is not None
    return adapter.experts
