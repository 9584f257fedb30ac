"""Tiny random checkpoints with a head, stored as they are published or converted, and what the head must compute."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.models.families.description import MtpSpec
from ingot.models.families.registry import mtp_spec_of
from ingot.upstream import import_upstream
from tests.models.layers import family_configs

Tensors = dict[str, mx.array]
FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "mimo", "ernie4_5_moe", "nemotron_h"),
    *("mimo_v2_flash", "step3p5", "step3p7"),
)


@dataclass(frozen=True)
class Made:
    """A model, and its head as tensors by the names of its published checkpoint, behind what all of them begin with."""

    family: str
    config: dict[str, Any]
    wiring: MtpSpec
    model: Any
    layers: list[Any]
    others: Tensors  # norms and the projection, by our names
    head: Tensors

    @property
    def prefix(self) -> str:
        text = {**self.config, **self.config.get("text_config", {})}
        around = "" if self.wiring.inside == "mtp." else "model."
        return around + self.wiring.inside.format(layers=text["num_hidden_layers"])

    @property
    def base(self) -> Tensors:
        return dict(tree_flatten(self.model.parameters()))  # type: ignore[arg-type]

    def expected(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """What the head gives for a whole sequence, by mlx-lm's layers alone."""
        embedded = _module(self.model, ("embed_tokens", "embeddings"))(tokens)
        if self.wiring.blind_first:
            embedded = mx.concatenate([mx.zeros_like(embedded[:, :1]), embedded[:, 1:]], axis=1)
        pair = [self._normed("embedding_norm", embedded), self._normed("hidden_norm", hidden)]
        joined = mx.concatenate(pair[::-1] if self.family == "mimo" else pair, axis=-1)
        states = joined @ self.others["joint"].T
        length = states.shape[1]
        mask = mx.arange(length)[:, None] >= mx.arange(length)
        if self.wiring.window is not None:
            mask = mask & (mx.arange(length)[:, None] < mx.arange(length) + WINDOW)
        for layer in self.layers:
            states = layer(states, mask, None)
        normed = "norm" in self.others and self.wiring.normed_chain
        return self._normed("norm", states) if normed else states

    def expected_logits(self, states: mx.array) -> mx.array:
        """Of what it gave, where it has an output head of its own."""
        states = states if self.wiring.normed_chain else self._normed("norm", states)
        return states @ self.others["output"].T

    def _normed(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.others[name], 1e-5)


def make(family: str) -> Made:
    config, wiring = head_config(family), mtp_spec_of(family)
    assert wiring is not None
    model = family_configs.build(family)
    alone = _alone(family, config, wiring)
    size = {**config, **config.get("text_config", {})}["hidden_size"]
    others = {
        "embedding_norm": _gain(size),
        "hidden_norm": _gain(size),
        "joint": 0.2 * mx.random.normal((size, 2 * size)),
        **({} if wiring.norm is None else {"norm": _gain(size)}),
        **({} if wiring.output is None else {"output": 0.2 * mx.random.normal((family_configs.VOCAB, size))}),
    }
    layers = list(alone.layers)[: len(wiring.layers)]
    published: Tensors = {}
    for number, layer in enumerate(layers):
        own: Tensors = dict(tree_flatten(layer.parameters()))  # type: ignore[arg-type]
        published |= {wiring.layers[number] + name: array for name, array in _published(family, config, own).items()}
    published |= {f"{vars(wiring)[name]}.weight": array for name, array in others.items()}
    return Made(family, config, wiring, model, layers, others, published)


WINDOW = 6
_UNLIKE: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {"sliding_window_size": WINDOW},
    "step": {
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""What the configs of models with a head say; Step's lists by layer go on behind the model's layers."""


def head_config(family: str) -> dict[str, Any]:
    config = family_configs.config(family)
    config.get("text_config", config).update(_UNLIKE.get("step" if family.startswith("step") else family, {}))
    return config


def differences(head: Tensors) -> Tensors:
    """The same tensors with norms stored as their differences from one."""
    return {name: array - 1 if "norm" in name else array for name, array in head.items()}


def packed(head: Tensors, bits: int = 8, group_size: int = 32) -> Tensors:
    """The same tensors with matrices packed."""
    result: Tensors = {}
    for name, array in head.items():
        if array.ndim < 2 or array.shape[-1] % group_size or name.endswith("conv1d.weight"):
            result[name] = array
            continue
        path = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size, bits)
        result |= {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}
    return result


def in_eight_bits(head: Tensors) -> tuple[Tensors, Tensors]:
    """The same tensors with the layers' matrices as DeepSeek publishes them, and what these stand for."""
    stored, meant = {}, {}
    for name, array in head.items():
        stored[name] = meant[name] = array
        if name.startswith(("self_attn.", "mlp.")) and "proj" in name and array.ndim == 2:
            factor = mx.max(mx.abs(array)) / 448
            stored[name] = mx.to_fp8(array / factor)
            stored[f"{name}_scale_inv"] = mx.broadcast_to(factor, tuple(-(-side // 128) for side in array.shape))
            meant[name] = mx.from_fp8(stored[name], mx.float32) * factor
    return stored, meant


def write(folder: Path, config: Mapping[str, Any], *, files: Mapping[str, Tensors]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / name), tensors)
    return folder


def write_shards(folder: Path, config: Mapping[str, Any], shards: Mapping[str, Tensors]) -> Path:
    """A checkpoint in several files, with the index that names them."""
    write(folder, config, files=shards)
    places = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def named(made: Made, head: Tensors | None = None) -> Tensors:
    """The head's tensors as a checkpoint of its model names them."""
    return {made.prefix + name: array for name, array in (head or made.head).items()}


def _alone(family: str, config: dict[str, Any], wiring: MtpSpec) -> Any:
    changed = copy.deepcopy(config)
    text = changed.get("text_config", changed)
    text |= wiring.alone
    if family.startswith("step"):
        changed, text["layer_types"] = text, ["sliding_attention"]
    module = import_upstream(f"mlx_lm.models.{'step3p5' if family == 'step3p7' else family}")
    alone = module.Model(module.ModelArgs.from_dict(changed))

    def widened(path: str, weight: mx.array) -> mx.array:
        return _gain(*weight.shape) if "norm" in path else weight + 0.2 * mx.random.normal(weight.shape)

    mx.random.seed(1)
    alone.update(tree_map_with_path(widened, alone.parameters()))
    mx.eval(alone.parameters())
    return alone


def _gain(*shape: int) -> mx.array:
    return 1 + 0.1 * mx.random.normal(shape)


def _module(model: nn.Module, names: tuple[str, ...]) -> Callable[[mx.array], mx.array]:
    return next(module for path, module in model.named_modules() if path.rpartition(".")[2] in names)  # type: ignore[return-value]


def _published(family: str, config: dict[str, Any], layer: Tensors) -> Tensors:
    """A layer's tensors as its family publishes them."""
    result: Tensors = {}
    for name, array in layer.items():
        if "switch_mlp" in name and family != "qwen3_5_moe":
            block, _, part = name.partition("switch_mlp.")
            part = part.replace("fc1", "up_proj").replace("fc2", "down_proj")
            result |= {f"{block}experts.{number}.{part}": array[number] for number in range(array.shape[0])}
        elif family == "mimo_v2_flash" and "post_attention_layernorm" in name:
            result[name.replace("post_attention_layernorm", "pre_mlp_layernorm")] = array
        elif "embed_q" not in name and "unembed_out" not in name and "switch_mlp" not in name:
            result[name] = array
    if family == "qwen3_5_moe":
        gate, up = (layer[f"mlp.switch_mlp.{part}_proj.weight"] for part in ("gate", "up"))
        result["mlp.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        result["mlp.experts.down_proj"] = layer["mlp.switch_mlp.down_proj.weight"]
    if "self_attn.embed_q.weight" in layer:
        keys, values = layer["self_attn.embed_q.weight"].swapaxes(-1, -2), layer["self_attn.unembed_out.weight"]
        joint = mx.concatenate([keys, values], axis=1)
        result["self_attn.kv_b_proj.weight"] = joint.reshape(-1, joint.shape[-1])
    return result
