"""Mixtures of experts: random models, written as GGUF files by llama.cpp's names, compared with what is imported."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import ModelError
from ingot.kernels.device import Device, DeviceKind, current_device
from ingot.models.files.progress import no_progress
from ingot.models.gguf.file import GGUFFile
from ingot.models.gguf.importer import convert_gguf
from ingot.models.layers.modules import named_parameters
from ingot.upstream import load_model, model_classes
from tests.launches import prompt_logits
from tests.models.gguf.making import TinyModel, byte_level_vocabulary, random_rows

mx = pytest.importorskip("mlx.core")

TOKENS = [5, 17, 200, 3, 90, 41, 7, 7, 120, 66, 251, 30]
VOCAB = len(byte_level_vocabulary()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
EXPERTS, USED, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, CONTEXT = 4, 2, 128, 4, 2, 32, 96, 128
NAMED = {  # mlx-lm stacks experts under names of its own
    "block_sparse_moe.switch_mlp": "mlp.experts",
    "switch_mlp": "experts",
    "embed_q": "k_b_proj",
    "unembed_out": "v_b_proj",
}
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts_per_tok": USED,
}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_layer_freq": 1,
}
LATENT = {
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 64,  # CUDA multiplies by no fewer than two groups of packed weights
    "v_head_dim": 32,
    "attention_bias": False,
    "num_key_value_heads": HEADS,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
SCALED = {"type": "yarn", "rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
FAMILIES: dict[str, tuple[MODEL_ARCH, dict[str, Any]]] = {
    "mixtral": (MODEL_ARCH.LLAMA, {"num_local_experts": EXPERTS, "intermediate_size": INNER}),
    "qwen2_moe": (
        MODEL_ARCH.QWEN2MOE,
        {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": (
        MODEL_ARCH.QWEN3MOE,
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "head_dim": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "olmoe": (MODEL_ARCH.OLMOE, {"num_experts": EXPERTS, "intermediate_size": INNER}),
    "granitemoe": (
        MODEL_ARCH.GRANITE_MOE,
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": INNER,
            "attention_bias": False,
            "logits_scaling": 6.0,
            "attention_multiplier": 0.02,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
        },
    ),
    "gpt_oss": (
        MODEL_ARCH.GPT_OSS,
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": INNER,
            "head_dim": HEAD,
            "sliding_window": 8,
            "rope_scaling": {"rope_type": "yarn", **YARN},
        },
    ),
    "glm4_moe": (
        MODEL_ARCH.GLM4_MOE,
        ROUTED
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": True, "attention_bias": True}
        | {"head_dim": HEAD, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "deepseek_v2": (
        MODEL_ARCH.DEEPSEEK2,
        ROUTED | LATENT | {"q_lora_rank": None, "topk_method": "greedy", "rope_scaling": SCALED},
    ),
    "deepseek_v3": (
        MODEL_ARCH.DEEPSEEK2,
        ROUTED | LATENT | {"q_lora_rank": 64, "n_group": 2, "topk_group": 1, "rope_scaling": SCALED},
    ),
}


def original(family: str, folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A random model as a folder; its config and weights."""
    from mlx.utils import tree_flatten

    config = {"model_type": family, **SHARED, **FAMILIES[family][1], **changes}
    mx.random.seed(3)
    model_class, args = model_classes(config)
    model = model_class(args.from_dict(config))
    weights = {
        name: 1 + 0.1 * mx.random.normal(array.shape) if "norm" in name else 0.08 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return config, {name: np.array(array) for name, array in weights.items()}


def metadata_of(architecture: str, config: dict[str, Any]) -> dict[str, object]:
    """What llama.cpp's converter writes of such a config."""
    head = config.get("head_dim", HIDDEN // HEADS)
    hyper: dict[str, object] = {
        "block_count": config["num_hidden_layers"],
        "context_length": CONTEXT,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": HEADS,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": int(head * config.get("partial_rotary_factor", 1)),
        "expert_count": EXPERTS,
        "expert_used_count": USED,
    }
    keys = {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "logits_scaling": "logit_scale",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "sliding_window": "attention.sliding_window",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
    }
    hyper |= {name: config[key] for key, name in keys.items() if config.get(key) is not None}
    if "head_dim" in config:
        hyper |= {"attention.key_length": head, "attention.value_length": head}
    if config["model_type"] in ("glm4_moe", "deepseek_v3"):
        hyper |= {"expert_gating_func": 2, "expert_weights_norm": True}
        hyper |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if "kv_lora_rank" in config:
        plain, rotated, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        hyper |= {"rope.dimension_count": rotated}
        hyper |= {"attention.key_length_mla": plain + rotated, "attention.value_length_mla": value}
        hyper |= {"attention.key_length": config["kv_lora_rank"] + rotated, "attention.head_count_kv": 1}
        hyper |= {"attention.value_length": config["kv_lora_rank"]}
    if config.get("rope_scaling"):
        scaling = config["rope_scaling"]
        hyper |= {"rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"]}
        hyper |= {"rope.scaling.original_context_length": scaling["original_max_position_embeddings"]}
        if "mscale_all_dim" in scaling:
            hyper |= {"rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"]}
    return {f"{architecture}.{key}": value for key, value in hyper.items()}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rows taken in turn, which is how llama's kind of rotation is stored."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def as_gguf(
    family: str, config: dict[str, Any], weights: dict[str, np.ndarray], kind: Kind = Kind.F32, **hyper: object
) -> TinyModel:
    architecture = MODEL_ARCH_NAMES[FAMILIES[family][0]]
    metadata = {"general.architecture": architecture, **byte_level_vocabulary()}
    model = TinyModel(metadata | metadata_of(architecture, config), {})
    model.metadata |= {f"{architecture}.{key}": value for key, value in hyper.items()}
    names = get_tensor_name_map(FAMILIES[family][0], config["num_hidden_layers"])
    for name, array in _as_published(family, config, weights).items():
        for ours, theirs in NAMED.items():
            name = name.replace(ours, theirs)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        values = np.ascontiguousarray(array.squeeze() if "shared_expert_gate" in name else array)
        stored = kind if "proj" in name and values.ndim > 1 and name.endswith("weight") else Kind.F32
        raw = quantize(values, stored) if stored != Kind.F32 else values
        model.tensors[gguf_name] = (stored, values.shape, raw)
    return model


def _as_published(family: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    published = {}
    for name, array in weights.items():
        if family in ("mixtral", "granitemoe") and re.search(r"self_attn\.[qk]_proj", name):
            array = interleaved(array, HEADS if "q_proj" in name else KV_HEADS)
        if name.endswith(("sinks", "e_score_correction_bias")):
            name += ".weight" if name.endswith("sinks") else ".bias"
            name = name.replace(".e_score_correction_bias.bias", ".e_score_correction.bias")
        if family == "deepseek_v2" and "kv_b_proj" in name:
            apart = array.reshape(HEADS, -1, config["kv_lora_rank"])
            plain = config["qk_nope_head_dim"]
            published[name.replace("kv_b", "k_b")] = apart[:, :plain].swapaxes(1, 2)
            name, array = name.replace("kv_b", "v_b"), apart[:, plain:]
        published[name] = array
    return published


def logits_of(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))[0]


def imported(model: TinyModel, folder: Path) -> Path:
    target = folder / "imported"
    target.mkdir()
    convert_gguf(model.write(folder / "tiny.gguf"), target, no_progress)
    return target


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_mixture_computes_what_its_original_computes(family: str, tmp_path: Path) -> None:
    config, weights = original(family, tmp_path / "original")
    folder = imported(as_gguf(family, config, weights), tmp_path)
    np.testing.assert_allclose(logits_of(folder), logits_of(tmp_path / "original"), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.MXFP4], ids=lambda kind: kind.name)
def test_experts_stay_packed_and_compute_what_their_values_compute(family: str, kind: Kind, tmp_path: Path) -> None:
    config, weights = original(family, tmp_path / "original")
    model = as_gguf(family, config, weights, kind)
    folder = imported(model, tmp_path)
    written = mx.load(str(folder / "model.safetensors"))
    experts = [name for name in written if re.search(r"(switch_mlp|mlp\.experts)\.\w+_proj\.weight", name)]
    assert experts
    assert all(written[name].dtype == mx.uint32 and written[name].ndim == 3 for name in experts)
    plain = {
        name: (Kind.F32, shape, model.dense(name)) if stored == kind else (stored, shape, raw)
        for name, (stored, shape, raw) in model.tensors.items()
    }
    dense = tmp_path / "dense"
    dense.mkdir()
    expected = logits_of(imported(TinyModel(model.metadata, plain), dense))
    np.testing.assert_allclose(logits_of(folder), expected, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_experts_in_tensors_of_their_own_are_put_together(kind: Kind, tmp_path: Path) -> None:
    config, weights = original("mixtral", tmp_path / "original")
    model = as_gguf("mixtral", config, weights, kind)
    together = tmp_path / "together"
    together.mkdir()
    expected = logits_of(imported(model, together))
    for name, (stored, shape, raw) in list(model.tensors.items()):
        if "_exps" in name:
            del model.tensors[name]
            for number in range(EXPERTS):
                model.tensors[name.replace("_exps", f".{number}")] = (stored, shape[1:], raw[number])
    np.testing.assert_array_equal(logits_of(imported(model, tmp_path)), expected)


def test_an_expert_that_is_missing_or_of_another_type_is_named(tmp_path: Path) -> None:
    config, weights = original("mixtral", tmp_path / "original")
    model = as_gguf("mixtral", config, weights)
    name = "blk.1.ffn_up_exps.weight"
    kind, shape, raw = model.tensors.pop(name)
    apart = {name.replace("_exps", f".{number}"): (kind, shape[1:], raw[number]) for number in range(EXPERTS)}
    model.tensors |= apart
    lacking = TinyModel(
        model.metadata, {key: tensor for key, tensor in model.tensors.items() if ".ffn_up.2." not in key}
    )
    (tmp_path / "lacking").mkdir()
    with pytest.raises(ModelError, match=r"lacks the tensor 'blk\.1\.ffn_up\.2\.weight'"):
        imported(lacking, tmp_path / "lacking")
    model.tensors["blk.1.ffn_up.2.weight"] = (Kind.Q8_0, shape[1:], quantize(raw[2], Kind.Q8_0))
    with pytest.raises(ModelError, match=r"experts of 'blk\.1\.ffn_up_exps\.weight' are of unlike types: F32, Q8_0"):
        imported(model, tmp_path)


def test_deepseek_files_with_keys_and_values_in_one_matrix_are_read_too(tmp_path: Path) -> None:
    for family in ("deepseek_v2", "deepseek_v3"):
        folder = tmp_path / family
        folder.mkdir()
        config, weights = original(family, folder / "original")
        model = as_gguf(family, config, weights)
        model.metadata |= {"deepseek2.attention.head_count_kv": HEADS}
        for key, mla in (("key_length", 80), ("value_length", 32)):
            model.metadata[f"deepseek2.attention.{key}"] = mla
            del model.metadata[f"deepseek2.attention.{key}_mla"]
        for layer in range(2):
            keys = model.tensors.pop(f"blk.{layer}.attn_k_b.weight")[2].view(np.float32).reshape(HEADS, 64, 64)
            values = model.tensors.pop(f"blk.{layer}.attn_v_b.weight")[2].view(np.float32).reshape(HEADS, 32, 64)
            rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, 64)
            model.tensors[f"blk.{layer}.attn_kv_b.weight"] = (Kind.F32, rows.shape, rows)
        np.testing.assert_allclose(logits_of(imported(model, folder)), logits_of(folder / "original"), atol=2e-5)


def test_layers_that_propose_tokens_are_left_out_of_glm(tmp_path: Path) -> None:
    config, weights = original("glm4_moe", tmp_path / "original")
    model = as_gguf("glm4_moe", config, weights, block_count=3, nextn_predict_layers=1)
    model.tensors["blk.2.nextn.eh_proj.weight"] = (Kind.F32, (4, 4), np.ones((4, 4), np.float32))
    folder = imported(model, tmp_path)
    assert config_of(folder)["num_hidden_layers"] == 2
    np.testing.assert_allclose(logits_of(folder), logits_of(tmp_path / "original"), atol=2e-5)


@pytest.mark.parametrize(
    ("family", "hyper", "reason"),
    [
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("mixtral", {"expert_weights_norm": False}, "expert_weights_norm is False"),
        ("qwen3_moe", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"scales rotary positions \(yarn\)"),
        ("olmoe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("olmoe", {"expert_shared_feed_forward_length": 64}, "expert_shared_feed_forward_length is 64"),
        ("deepseek_v2", {"expert_weights_norm": True}, "expert_weights_norm is True"),
        ("deepseek_v3", {"leading_dense_block_count": 3}, "leading_dense_block_count is 3 of 2 layers"),
        ("glm4_moe", {"nextn_predict_layers": 2}, "nextn_predict_layers is 2 of 2 layers"),
        (
            "mixtral",
            {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64},
            "key_length is 64",
        ),
    ],
)
def test_a_mixture_that_would_be_run_differently_is_refused(
    family: str, hyper: dict[str, object], reason: str, tmp_path: Path
) -> None:
    config, weights = original(family, tmp_path / "original")
    with pytest.raises(ModelError, match=reason):
        imported(as_gguf(family, config, weights, **hyper), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_what_mlx_lm_computes_of_packed_experts(family: str, tmp_path: Path) -> None:
    from ingot.models.adapter import load_model_adapter

    config, weights = original(family, tmp_path / "original")
    folder = imported(as_gguf(family, config, weights, Kind.MXFP4 if family == "gpt_oss" else Kind.Q8_0), tmp_path)
    adapter = load_model_adapter(folder, current_device())
    found = np.array(prompt_logits(adapter, TOKENS).astype(mx.float32))
    expected = logits_of(folder)
    # On CPUs activations are rounded to 8 bits, by which a router of random weights may choose another expert.
    moved = np.sqrt(np.mean((found - expected) ** 2, axis=1) / np.mean(expected**2, axis=1))
    assert np.median(moved) < 0.04


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mixtral", "cpu"),
        pytest.param("mixtral", "cuda", marks=pytest.mark.slow),
        ("qwen3_moe", "cpu"),
        ("qwen3_moe", "cuda"),
    ],
)
def test_experts_of_the_k_formats_stay_in_the_bits_of_the_file(family: str, kind: DeviceKind, tmp_path: Path) -> None:
    from ingot.kernels.cpu import native
    from ingot.models.adapter import load_model_adapter

    inner = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    config, weights = original(family, tmp_path / "original", hidden_size=256, head_dim=64, **{inner: 256})
    model, rng = as_gguf(family, config, weights), np.random.default_rng(1)
    for name, (_, shape, _) in list(model.tensors.items()):
        if "_exps" in name:
            packed = Kind.Q6_K if "ffn_down" in name else Kind.Q4_K
            raw = random_rows(rng, packed, math.prod(shape[:-1]), shape[-1], 0.06)
            model.tensors[name] = (packed, shape, raw.reshape(*shape[:-1], -1))
    plain = {name: (Kind.F32, shape, model.dense(name)) for name, (_, shape, _) in model.tensors.items()}
    (tmp_path / "dense").mkdir()
    expected = logits_of(imported(TinyModel(model.metadata, plain), tmp_path / "dense"))
    folder = imported(model, tmp_path)
    in_file = sum(raw.nbytes for name, (_, _, raw) in model.tensors.items() if "_exps" in name)
    adapter = load_model_adapter(folder, Device(kind, "a device", 1 << 34))
    tensor = {
        path: array.nbytes
        for path, array in named_parameters(adapter.model)
        if "switch_mlp" in path or "experts" in path
    }
    found = np.array(prompt_logits(adapter, TOKENS).astype(mx.float32))
    moved = np.sqrt(np.mean((found - expected) ** 2, axis=1) / np.mean(expected**2, axis=1))
    assert np.median(moved) < 0.04
    most = 1.4 if kind == "cuda" else 1.1 if native.available() else 8.0
    assert sum(tensor.values()) <= most * in_file


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "glm4_moe"])
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sample")
    config, weights = original(request.param, folder / "original")
    return as_gguf(request.param, config, weights, Kind.Q8_0).write(folder / "tiny.gguf").read_bytes()


@given(data=st.data())
def test_a_damaged_header_gives_a_mixture_or_a_model_error(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "tiny.gguf"
    path.write_bytes(sample)
    with GGUFFile(path) as file:
        end = file.data_offset
    damaged = bytearray(sample)
    begin = sample.index(b"block_count")  # what describes the model comes behind the vocabulary
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(begin, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    (folder / "made").mkdir()
    with contextlib.suppress(ModelError):
        convert_gguf(path, folder / "made", no_progress)
