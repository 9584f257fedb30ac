import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ingot.errors import ModelError
from ingot.models.files.progress import no_progress
from ingot.models.gguf.blueprint import llama3_divisors
from ingot.models.gguf.file import GGUFFile
from ingot.models.gguf.importer import convert_gguf
from ingot.models.gguf.quant_types import BLOCK_BITS, EXACT_LATTICES, KNOWN_KINDS, LATTICE_ERRORS
from tests.models.gguf.making import HEAD, TinyModel, sentencepiece_vocabulary, tiny_model

TOKENS = [5, 17, 200, 3, 90, 41, 7, 7, 120, 66, 251, 30]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_MODULES = MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def converted(model: TinyModel, folder: Path, **options: Any) -> Path:
    source, target = model.write(folder / "tiny.gguf"), folder / "converted"
    target.mkdir()
    convert_gguf(source, target, no_progress, **options)
    return target


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def plain_weights(model: TinyModel) -> dict[str, np.ndarray]:
    """The dense weights under the model's names, without the import's own mapping and reordering."""
    gemma = model.metadata["general.architecture"] == "gemma3"
    weights = {}
    for name in model.tensors:
        layer, source, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
        module = (GEMMA_MODULES if gemma else MODULES)[source]
        path = f"model.layers.{layer}.{module}" if layer else module
        weights[f"{path}.{part}"] = model.dense(name) - (gemma and source.endswith("norm"))
    return weights


def logits_of(folder: Path, config: dict[str, Any] | None = None) -> np.ndarray:
    """Computed in float32, so that only the weights' own values can differ."""
    mx = pytest.importorskip("mlx.core")
    from ingot.kernels.device import Device
    from ingot.models.gguf.weights import with_gguf_blocks
    from ingot.models.precision import settle_precision
    from ingot.upstream import load_model, model_classes

    model, _ = load_model(folder, model_config=config, get_model_classes=with_gguf_blocks(model_classes))
    settle_precision(model, Device("cpu", "a CPU", 1 << 34), "float32")
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))[0]


def expected_logits(model: TinyModel, folder: Path) -> np.ndarray:
    """The same model with dense float32 weights, its interleaved rotary order left as the file has it."""
    from safetensors.numpy import save_file

    config = config_of(folder)
    config.pop("quantization", None)
    config.pop("gguf_blocks", None)
    dense = folder.parent / "dense"
    dense.mkdir()
    if model.metadata["general.architecture"] == "llama":
        config["rope_traditional"] = True
    (dense / "config.json").write_text(json.dumps(config))
    save_file(plain_weights(model), dense / "model.safetensors")
    return logits_of(dense)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_what_its_dense_weights_compute(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model(architecture, kinds=[Kind.F32], tied=tied)
    folder = converted(model, tmp_path)
    np.testing.assert_allclose(logits_of(folder), expected_logits(model, folder), atol=2e-5)
    assert config_of(folder)["tie_word_embeddings"] is tied


# Of Qwen3 and Gemma 3 files transformers does not read the head size or the query scale, but takes the usual ones.
@pytest.mark.oracle
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_reads_the_same_model_out_of_the_file(architecture: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    model = tiny_model(architecture, kinds=[Kind.F32])
    folder = converted(model, tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(folder), expected, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_reads_the_same_model_out_of_the_folder(architecture: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = converted(tiny_model(architecture, kinds=[Kind.F32], tied=False), tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(folder), expected, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(KNOWN_KINDS - {Kind.F32}), ids=lambda kind: kind.name)
def test_every_format_computes_what_its_dense_weights_compute(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", kinds=[kind])
    folder = converted(model, tmp_path)
    expected = expected_logits(model, folder)
    # What the weights move by is told apart (see the lattices); each of the few layers adds its own.
    moved = 8 * LATTICE_ERRORS.get(kind, 2**-11 if kind in EXACT_LATTICES else 0.0) * np.abs(expected).max()
    np.testing.assert_allclose(logits_of(folder), expected, atol=max(moved, 5e-5))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_formats_are_listed_module_by_module(architecture: str, tmp_path: Path) -> None:
    kinds = [Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.Q4_1]
    model = tiny_model(architecture, kinds=kinds)
    folder = converted(model, tmp_path)
    quantization = config_of(folder)["quantization"]
    assert {key: quantization[key] for key in ("group_size", "bits", "mode")} == {
        "group_size": 32, "bits": 4, "mode": "affine",
    }  # fmt: skip
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    blocks = config_of(folder)["gguf_blocks"]
    assert blocks["model.layers.0.self_attn.q_proj"] == "Q4_K" and blocks["model.layers.0.self_attn.k_proj"] == "Q6_K"
    assert all(quantization[module] is False for module in blocks)
    assert quantization["model.layers.0.self_attn.o_proj"]["bits"] == 5
    assert "model.layers.0.self_attn.v_proj" not in quantization  # Q4_0: as usual
    np.testing.assert_allclose(logits_of(folder), expected_logits(model, folder), atol=5e-5)


def test_scales_are_float16_where_that_is_exact_and_norms_are_float32(tmp_path: Path) -> None:
    weights = load_file(converted(tiny_model("llama", kinds=[Kind.Q4_1]), tmp_path) / "model.safetensors")
    assert weights["model.embed_tokens.scales"].dtype == np.float16
    assert weights["model.layers.0.input_layernorm.weight"].dtype == np.float32


@pytest.mark.parametrize("kind", sorted(BLOCK_BITS), ids=lambda kind: kind.name)
def test_blocks_of_two_levels_stay_as_they_lie_in_the_file(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("qwen2", kinds=[kind])
    weights = load_file(converted(model, tmp_path) / "model.safetensors")
    np.testing.assert_array_equal(
        weights["model.layers.0.mlp.down_proj.weight"], model.tensors["blk.0.ffn_down.weight"][2]
    )


def test_biases_of_llama_models_are_taken_along(tmp_path: Path) -> None:
    model = tiny_model("llama")
    rng = np.random.default_rng(1)
    for layer in range(2):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            width = model.tensors[f"blk.{layer}.{part}.weight"][1][0]
            values = rng.standard_normal(width).astype(np.float32) * np.float32(0.1)
            model.tensors[f"blk.{layer}.{part}.bias"] = (Kind.F32, (width,), values)
    folder = converted(model, tmp_path)
    np.testing.assert_allclose(logits_of(folder), expected_logits(model, folder), atol=2e-5)


def test_a_large_model_comes_in_parts(tmp_path: Path) -> None:
    model = tiny_model("qwen3", kinds=[Kind.Q8_0])
    folder = converted(model, tmp_path, shard_bytes=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    np.testing.assert_allclose(logits_of(folder), expected_logits(model, folder), atol=2e-2)


def test_the_tokenizer_and_its_configs_are_written(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.metadata |= {
        "tokenizer.chat_template.tools": "{{ tools }}",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 40,
    }
    folder = converted(model, tmp_path)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    assert tokens["model"]["type"] == "BPE"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [268, 266] and generation["temperature"] == 0.6 and generation["top_k"] == 40
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


def test_transformers_loads_the_tokenizer_as_it_was_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted(tiny_model("llama"), tmp_path))
    text = "<|im_start|>hello  wor 12\n\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == (
        "<|im_start|>hello<|im_end|>"
    )
    spm = tmp_path / "spm"
    spm.mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        converted(tiny_model("llama", vocabulary=sentencepiece_vocabulary()), spm)
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello world")) == ["<s>", "▁hello", "▁world"]


def scaled(architecture: str, **options: object) -> TinyModel:
    model = tiny_model(architecture)
    model.metadata |= {f"{architecture}.rope.scaling.{key}": value for key, value in options.items()}
    return model


def test_rotary_scaling_is_said_as_mlx_lm_says_it(tmp_path: Path) -> None:
    cases: list[tuple[TinyModel, dict[str, Any] | None]] = [
        (scaled("llama"), None),
        (scaled("llama", type="none", factor=8.0), None),
        (scaled("gemma3", type="linear", factor=8.0), {"rope_type": "linear", "factor": 8.0}),
        (
            scaled("qwen3", type="yarn", factor=4.0, original_context_length=32),
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 32.0, "beta_slow": 1.0,
            },
        ),
    ]  # fmt: skip
    for number, (model, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert config_of(converted(model, folder)).get("rope_scaling") == expected
        assert np.isfinite(logits_of(folder / "converted")).all()


def test_llama3_frequencies_become_the_rule_that_made_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.metadata["llama.rope.freq_base"] = 500000.0
    divisors = llama3_divisors(500000.0, HEAD, 32.0, 8192).astype(np.float32)
    model.tensors["rope_freqs.weight"] = (Kind.F32, (HEAD // 2,), divisors)
    scaling = config_of(converted(model, tmp_path))["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.models.rope_utils import initialize_rope

    rope = initialize_rope(HEAD, 500000.0, False, scaling, 131072)
    plain = 500000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    np.testing.assert_allclose(np.array(rope._freqs.astype(mx.float32)), plain * divisors, rtol=1e-4)


def test_the_config_says_what_people_call_the_files_formats(tmp_path: Path) -> None:
    for stated, called in ((15, "Q4_K_M"), (0, "F32"), (None, "Q8_0"), (1024, "Q8_0"), ("x", "Q8_0")):
        model = tiny_model("llama", kinds=[Kind.Q8_0])
        model.metadata |= {"general.file_type": stated} if stated is not None else {}
        folder = tmp_path / str(stated)
        folder.mkdir()
        assert config_of(converted(model, folder))["gguf_file_type"] == called


def test_the_config_says_which_weights_moved(tmp_path: Path) -> None:
    for kind, stated in (
        (Kind.IQ4_XS, {"IQ4_XS": {"bits": 6, "percent": 1.5}}),
        (Kind.IQ3_S, None),
        (Kind.MXFP4, None),
        (Kind.Q8_0, None),
    ):
        (tmp_path / kind.name).mkdir()
        config = config_of(converted(tiny_model("llama", kinds=[kind]), tmp_path / kind.name))
        assert config.get("gguf_moved") == stated


def test_gemma_keeps_its_window_its_two_bases_and_its_scale(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    model.metadata["gemma3.attention.sliding_window_pattern"] = [True, True, False, True, True, False, True]
    config = config_of(converted(model, tmp_path))
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (8, 3)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 10000.0)
    assert config["query_pre_attn_scalar"] == HEAD


Change = dict[str, object]


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        (
            "llama",
            {"general.architecture": "llama9"},
            "'llama9' are not supported .nearest: llama.; supported are: llama",
        ),
        ("llama", {"llama.block_count": None}, "lacks llama.block_count"),
        ("llama", {"llama.block_count": 4_000_000_000}, "more than the file has tensors"),
        ("llama", {"llama.block_count": 3}, r"lacks the tensor 'blk\.2\."),
        ("llama", {"llama.block_count": 1}, r"has the tensor 'blk\.1\..*', which llama models do not have"),
        ("qwen3", {"qwen3.expert_count": 8}, "qwen3.expert_count is 8"),
        ("llama", {"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ("llama", {"llama.attention.key_length": 32}, "llama.attention.value_length is 64"),
        ("llama", {"llama.rope.dimension_count": 32}, "llama.rope.dimension_count is 32"),
        ("llama", {"llama.logit_scale": 0.5}, "sets llama.logit_scale"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'"),
        ("qwen3", {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3", {"gemma3.attention.sliding_window": None}, "lacks gemma3.attention.sliding_window"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 9}, "without global layers"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {"general.sampling.temp": float("nan")}, "general.sampling.temp is nan"),
        ("llama", {"general.type": "adapter"}, "general.type is 'adapter'"),
        ("llama", {"general.quantization_version": 1}, "general.quantization_version 1"),
        ("llama", {"llama.context_length": 0}, "llama.context_length is 0"),
    ],
)
def test_a_model_that_would_be_run_differently_is_refused(
    architecture: str, change: Change, reason: str, tmp_path: Path
) -> None:
    model = tiny_model(architecture)
    model.metadata = {key: value for key, value in (model.metadata | change).items() if value is not None}
    with pytest.raises(ModelError, match=reason):
        converted(model, tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    for name in ("token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"):
        model = tiny_model("llama")
        del model.tensors[name]
        (tmp_path / name).mkdir()
        with pytest.raises(ModelError, match=f"lacks the tensor '{name}'"):
            converted(model, tmp_path / name)


def test_a_tensor_of_another_type_or_shape_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.tensors["blk.0.ffn_up.weight"] = (Kind.NVFP4, (512, 256), np.zeros((512, 144), np.uint8))
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' is NVFP4, which is not supported"):
        converted(model, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    model = tiny_model("llama")
    model.tensors["blk.0.ffn_up.weight"] = model.tensors["blk.0.ffn_down.weight"]
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has the shape \[256, 512\], not \[512, 256\]"):
        converted(model, other)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q6_K])
def test_numbers_that_are_not_finite_are_refused(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", kinds=[kind])
    raw = model.tensors["blk.0.ffn_up.weight"][2]
    raw[0, -2:] = np.array([0x80, 0x7F], np.uint8)  # infinity as float32 and bfloat16, NaN as float16
    raw[0, :2] = np.array([0x80, 0x7F], np.uint8)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' holds numbers that are not finite"):
        converted(model, tmp_path)


def test_rotary_divisors_that_no_rule_gives_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    divisors = np.linspace(1, 9, HEAD // 2).astype(np.float32)
    model.tensors["rope_freqs.weight"] = (Kind.F32, (HEAD // 2,), divisors)
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' holds a frequency scaling"):
        converted(model, tmp_path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tiny_model("llama", kinds=[Kind.Q4_0], layers=1).write(path).read_bytes()


@given(data=st.data())
def test_a_damaged_header_gives_a_model_or_a_model_error(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "tiny.gguf"
    path.write_bytes(sample)
    with GGUFFile(path) as file:
        end = file.data_offset
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    (folder / "converted").mkdir()
    with contextlib.suppress(ModelError):
        convert_gguf(path, folder / "converted", no_progress)
