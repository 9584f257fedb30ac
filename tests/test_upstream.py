from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from bench import random_models
from ingot.upstream import (
    RENAMED,
    RENAMED_BY_CLASS,
    import_upstream,
    load_config,
    load_model,
    model_classes,
    packing_of,
)
from tests import tiny
from tests.cli.scripted import environment

DENSE = Path(__file__).parent.parent / "foundry/models/dense"
HEAVY = ("transformers", "huggingface_hub")

SAME_PROCESS = """
import os, resource, signal, sys, threading, warnings
def settings():
    return (
        resource.getrlimit(resource.RLIMIT_NOFILE), dict(os.environ), os.getcwd(), os.umask(os.umask(0)),
        sys.getrecursionlimit(), {s: signal.getsignal(s) for s in signal.valid_signals()},
        sys.modules.get("resource"), resource.setrlimit,
    )
def check():
    for one, other in zip(before, settings()):
        assert one == other, (one, other)
before = settings()
import ingot.engine.loading.language_model, ingot.upstream
assert "mlx_vlm" not in sys.modules, "text models pay for what only those need that see"
check()
import mlx_lm.models.llama, mlx_lm
assert not hasattr(mlx_lm, "__wrapped__") and mlx_lm.models.llama.Model
assert "transformers" not in sys.modules, "the whole of mlx_lm is there for who asks for it, and only then"
from mlx_lm import __version__, load, stream_generate
import mlx_lm.utils
assert load is mlx_lm.utils.load and mlx_lm.__file__.endswith("__init__.py") and "load" in mlx_lm.__all__
assert mlx_lm.models.llama is sys.modules["mlx_lm.models.llama"]
check()
ingot.upstream.import_upstream("mlx_vlm.utils")
check()
"""


def test_importing_the_product_then_the_whole_of_mlx_lm_and_then_what_sees_leaves_the_process_as_it_was() -> None:
    subprocess.run([sys.executable, "-c", SAME_PROCESS], check=True, timeout=120)


def test_a_server_starts_without_transformers_and_the_hub(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ingot", "serve", str(DENSE), "--port", "0"]
    with (tmp_path / "imports").open("w+") as imports:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=imports, text=True, env=environment(tmp_path)
        ) as server:
            assert server.stdout is not None
            ready = any(line.startswith("ready: ") for line in server.stdout)
            server.kill()
        imports.seek(0)
        lines = imports.read().splitlines()
    assert ready, lines[-5:]
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "mlx_lm.models.base" in imported, "imports are listed"
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}


def test_no_family_of_mlx_lm_needs_transformers() -> None:
    request = (
        "import importlib, pkgutil, sys, ingot.upstream, mlx_lm.models\n"
        "for module in pkgutil.iter_modules(mlx_lm.models.__path__):\n"
        "    try: importlib.import_module(f'mlx_lm.models.{module.name}')\n"
        "    except (ImportError, SystemExit): pass  # one asks Python to exit where a package is missing\n"
        "assert 'transformers' not in sys.modules and 'mlx_lm.utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", request], check=True, timeout=120)


def test_types_that_run_another_types_code_are_those_of_mlx_lm() -> None:
    utils = import_upstream("mlx_lm.utils")
    assert (RENAMED, RENAMED_BY_CLASS) == (utils.MODEL_REMAPPING, utils.MODEL_ARCHITECTURE_REMAPPING)


@pytest.mark.parametrize(
    ("stated", "family"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "llama"),
        ({"model_type": "bailing_hybrid", "architectures": "BailingMoeV3ForCausalLM"}, "bailing_moe_v3"),
        ({"model_type": "qwen3", "architectures": None}, "qwen3"),
    ],
)
def test_classes_are_those_that_mlx_lm_finds(stated: dict[str, Any], family: str) -> None:
    assert model_classes(stated) == import_upstream("mlx_lm.utils")._get_classes(stated)
    assert model_classes(stated)[0].__module__ == f"mlx_lm.models.{family}"


def test_a_type_that_mlx_lm_lacks_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="no_such_type"):
        model_classes({"model_type": "no_such_type"})


def test_a_config_is_read_as_mlx_lm_reads_it(tmp_path: Path) -> None:
    stated = {
        "model_type": "llama",
        "eos_token_id": 1,
        "deep": [{"most": {"__float__": "-Infinity"}}, {"__float__": "x"}],
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    for generation in (None, '{"eos_token_id": [2, 3]}', '{"eos_token_id": null}', "no JSON"):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(generation)
        assert load_config(tmp_path) == import_upstream("mlx_lm.utils").load_config(tmp_path)


def written(folder: Path, config: dict[str, Any], packed: dict[str, Any] | None = None) -> Path:
    model = random_models.build(config)
    if packed is not None:
        every, own = packed["quantization"], packed["quantization"].get("model.layers.0.self_attn.q_proj")
        nn.quantize(
            model,
            every["group_size"],
            every["bits"],
            mode=every.get("mode", "affine"),
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized")
                and "lm_head" not in path
                and (own if own is not None and path == "model.layers.0.self_attn.q_proj" else True)
            ),
        )
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, **(packed or {})}))
    return folder


@pytest.mark.parametrize(
    "packed",
    [
        None,
        {"quantization": {"group_size": 32, "bits": 4}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "quantization_config": {}},
        {"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}},
        {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
        {
            "quantization": {
                **{"group_size": 32, "bits": 4},
                "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8},
            }
        },
    ],
    ids=["plain", "affine", "mxfp4", "mxfp8", "nvfp4", "a layer otherwise"],
)
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_a_model_is_loaded_as_mlx_lm_loads_it(kind: str, packed: dict[str, Any] | None, tmp_path: Path) -> None:
    config = {**tiny.CONFIGS[kind], "moe_intermediate_size": 32, "intermediate_size": 64}
    folder = written(tmp_path, config, packed)
    mine, found = load_model(folder, model_config={"rms_norm_eps": 1e-6})
    theirs, wanted = import_upstream("mlx_lm.utils").load_model(folder, model_config={"rms_norm_eps": 1e-6})
    assert found == wanted and not mine.training
    tokens = mx.array([[5, 17, 3]])
    assert mx.array_equal(mine(tokens), theirs(tokens)).item()
    assert [(name, a.dtype) for name, a in tree_flatten(mine.parameters())] == [
        (name, a.dtype) for name, a in tree_flatten(theirs.parameters())
    ]


def test_weights_that_others_packed_are_left_to_mlx_lm(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "intermediate_size": 64}
    folder = written(tmp_path, config, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}})
    wanted, _ = load_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    model, found = load_model(folder)
    assert found["quantization"]["mode"] == "mxfp4"
    assert mx.array_equal(model(mx.array([[5, 17]])), wanted(mx.array([[5, 17]]))).item()


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 8]}
FP8_ROWS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
FP8_WHOLE = {"quant_method": "modelopt", "quant_algo": "FP8"}


def in_fp8(weight: mx.array, packing: dict[str, Any]) -> tuple[mx.array, dict[str, mx.array]]:
    """The values of a weight that was rounded, and its tensors, as checkpoints have them."""
    rows, columns = weight.shape
    high, wide = {"fp8": (16, 8), "modelopt": (rows, columns)}.get(packing["quant_method"], (1, columns))
    padded = mx.pad(weight, [(0, -rows % high), (0, -columns % wide)])
    tiles = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = mx.abs(tiles).max(axis=(1, 3)) / 448
    codes = mx.to_fp8(tiles / scales[:, None, :, None])
    values = (mx.from_fp8(codes, dtype=mx.float32) * scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    stored = {"weight": codes.reshape(padded.shape)[:rows, :columns]}
    name = "weight_scale_inv" if packing is FP8_BLOCKS else "weight_scale"
    stored[name] = scales.reshape(()) if packing is FP8_WHOLE else scales
    return values.astype(mx.bfloat16), stored | {"input_scale": mx.ones(())}


@pytest.mark.parametrize("packing", [FP8_BLOCKS, FP8_ROWS, FP8_WHOLE], ids=["blocks", "rows", "whole"])
def test_weights_in_8_bit_floats_become_bfloat16_of_the_same_values(packing: dict[str, Any], tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "intermediate_size": 52}
    model = random_models.build(config, dtype=mx.bfloat16)
    stored, wanted = dict[str, mx.array](), dict[str, mx.array]()
    for name, weight in tree_flatten(model.parameters()):
        wanted[name], own = weight, {"weight": weight}
        if name.endswith("_proj.weight"):
            wanted[name], own = in_fp8(weight.astype(mx.float32), packing)
        stored |= {name.removesuffix("weight") + part: array for part, array in own.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))
    loaded, found = load_model(tmp_path)
    assert not found["quantization_config"]
    for name, weight in tree_flatten(loaded.parameters()):
        assert mx.array_equal(weight, wanted[name]).item(), name


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqs_weights_have_the_same_values_in_mlxs_format(bits: int, tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "intermediate_size": 64}
    stored, wanted, each = dict[str, mx.array](), dict[str, mx.array](), 32 // bits
    shifts = mx.arange(each, dtype=mx.uint32) * bits
    for name, weight in tree_flatten(random_models.build(config).parameters()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        path, groups = name.removesuffix(".weight"), columns // 32
        codes = mx.random.randint(0, 1 << bits, (columns, rows)).astype(mx.uint32)
        zeros = mx.random.randint(1, 1 << bits, (groups, rows)).astype(mx.uint32)
        scales = mx.random.uniform(0.5, 1, (groups, rows))
        values = (codes.reshape(groups, 32, rows).astype(mx.float32) - zeros[:, None]) * scales[:, None]
        wanted[path] = values.reshape(columns, rows).T
        stored[f"{path}.qweight"] = (codes.reshape(-1, each, rows) << shifts[:, None]).sum(axis=1).view(mx.int32)
        stored[f"{path}.qzeros"] = ((zeros - 1).reshape(groups, -1, each) << shifts).sum(axis=-1).view(mx.int32)
        stored |= {f"{path}.scales": scales, f"{path}.g_idx": mx.arange(columns) // 32, f"{path}.bias": mx.zeros(rows)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    packing = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))
    model, _ = load_model(tmp_path)
    for path, module in model.named_modules():
        if path in wanted:
            values = mx.dequantize(module.weight, module.scales, module.biases, 32, bits)
            assert mx.allclose(values, wanted[path], atol=1e-4).item(), path


def packed_by_others(weight: mx.array, method: str) -> tuple[mx.array, dict[str, mx.array]]:
    """The values of a weight in 4 bits, and its tensors, as checkpoints have them."""
    rows, columns = weight.shape
    codes = mx.random.randint(0, 16, (rows, columns)).astype(mx.uint32)
    zeros = mx.random.randint(1, 16, (rows, columns // 32)).astype(mx.uint32)
    scales = mx.random.uniform(0.01, 0.02, (rows, columns // 32))

    def words(of: mx.array, order: tuple[int, ...] = tuple(range(8))) -> mx.array:
        eights = mx.contiguous(of).reshape(len(of), -1, 8)[..., mx.array(order)]
        return (eights << (mx.arange(8, dtype=mx.uint32) * 4)).sum(axis=-1).view(mx.int32)

    if method == "awq":
        swapped = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {"qweight": words(codes.T, swapped), "qzeros": words(zeros.T, swapped), "scales": scales.T}
    elif method == "gptq":
        stored = {"qweight": words(codes).T, "qzeros": words((zeros - 1).T), "scales": scales.T}
    else:
        zeros = mx.full(zeros.shape, 8, mx.uint32)
        stored = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": mx.array([rows, columns])}
    around = codes.reshape(rows, -1, 32).astype(mx.float32) - zeros[..., None]
    return (around * scales[..., None]).reshape(rows, columns), stored


COMPRESSED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def save_mixture(method: str, folder: Path) -> dict[str, mx.array]:
    """A mixture of experts with weights in the format of others; returns their values, by path."""
    config = {**tiny.CONFIGS["moe"], "moe_intermediate_size": 32}
    packing = {"quant_method": method, "bits": 4, "group_size": 32}
    if method == "compressed-tensors":
        packing |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": COMPRESSED}}}
    stored, values = dict[str, mx.array](), dict[str, mx.array]()
    for name, weight in tree_flatten(random_models.build(config).parameters()):
        path = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            stored[name] = weight
        elif weight.ndim == 2:
            values[path], parts = packed_by_others(weight, method)
            stored |= {f"{path}.{part}": array for part, array in parts.items()}
        else:
            each = [packed_by_others(of_expert, method) for of_expert in weight]
            values[path] = mx.stack([of_expert for of_expert, _ in each])
            for number, (_, parts) in enumerate(each):
                alone = path.replace("switch_mlp", f"experts.{number}")
                stored |= {f"{alone}.{part}": array for part, array in parts.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))
    return values


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_experts_in_the_formats_of_others_have_the_same_values_in_mlxs(method: str, tmp_path: Path) -> None:
    wanted = save_mixture(method, tmp_path)
    model, _ = load_model(tmp_path)
    found = {path: module for path, module in model.named_modules() if path in wanted}
    assert found.keys() == wanted.keys()
    for path, module in found.items():
        values = mx.dequantize(module.weight, module.scales, module.biases, 32, 4)
        assert mx.allclose(values, wanted[path], atol=1e-5).item(), path


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_both_halves_of_a_latents_projection_have_the_same_values_as_in_the_formats_of_others(
    method: str, tmp_path: Path
) -> None:
    config = {**tiny.CONFIGS["indexed"], "model_type": "deepseek_v3", "kv_lora_rank": 32}
    heads, key, value = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    stored, wanted = dict[str, mx.array](), dict[str, mx.array]()
    for name, weight in tree_flatten(random_models.build(config).parameters()):
        if "unembed_out" in name:
            continue
        if "embed_q" not in name:
            stored[name] = weight
            continue
        path = name.replace("embed_q.weight", "kv_b_proj")
        values, parts = packed_by_others(mx.zeros((heads * (key + value), config["kv_lora_rank"])), method)
        stored |= {f"{path}.{part}": array for part, array in parts.items()}
        keys, of_values = mx.split(values.reshape(heads, key + value, -1), [key], axis=1)
        wanted |= {name: keys.swapaxes(-1, -2), name.replace("embed_q", "unembed_out"): of_values}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    packing = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))
    found = dict(tree_flatten(load_model(tmp_path)[0].parameters()))
    assert wanted
    for name, values in wanted.items():
        assert mx.allclose(found[name], values, atol=1e-5).item(), name


def test_compressed_tensors_in_forms_that_mlx_lacks_are_refused(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a.weight_packed": mx.zeros((4, 8), mx.int32)})
    groups = {"group_0": {"weights": {**COMPRESSED, "symmetric": False}}}
    packing = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIGS["llama"], "quantization_config": packing}))
    with pytest.raises(ValueError, match="'symmetric': False"):
        load_model(tmp_path)


def test_gptqs_weights_in_another_order_are_refused(tmp_path: Path) -> None:
    stored = {"a.qweight": mx.zeros((4, 8), mx.int32), "a.g_idx": mx.zeros(32, mx.int32) + 1}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    packing = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIGS["llama"], "quantization_config": packing}))
    with pytest.raises(ValueError, match="desc_act"):
        load_model(tmp_path)


def test_scales_that_do_not_fit_their_weights_are_refused(tmp_path: Path) -> None:
    stored = {"model.norm.weight": mx.zeros((20, 8), mx.uint8), "model.norm.weight_scale_inv": mx.zeros((3, 1))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    config = {**tiny.CONFIGS["llama"], "quantization_config": FP8_BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has scales for 3 blocks, and 20 numbers"):
        load_model(tmp_path)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path, tiny.CONFIGS["llama"])
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIGS["llama"], "model_file": "mine.py"}))
    (folder / "mine.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match=r"'mine\.py', which is not run"):
        load_model(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["llama"]))
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_model(tmp_path)


def test_weights_that_are_packed_in_no_mode_are_refused() -> None:
    weights = {"a.weight": mx.zeros((4, 8), mx.uint32), "a.scales": mx.zeros((4, 1), mx.uint8)}
    with pytest.raises(ValueError, match="4 bits in groups of 64"):
        packing_of("a", nn.Linear(64, 4), weights)
