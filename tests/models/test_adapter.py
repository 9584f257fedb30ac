"""What a model's live states hold."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_map_with_path

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import random_models
from ingot.cache.layer_state import LayerState
from ingot.engine.request import Request, Sampling, Stop
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, adapt_model, load_model_adapter
from ingot.models.files.progress import no_progress
from ingot.models.gguf.importer import convert_gguf
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.fused_layers import FusedLayers
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.recurrent import NativeRecurrence
from ingot.models.layers.swapping import restore_mlx_lm_modules
from ingot.models.probe import logits_gap
from tests import engines, tiny
from tests.launches import computed, prompt_logits
from tests.models.gguf.making import tiny_model
from tests.models.layers import family_configs

pytestmark = pytest.mark.usefixtures("rules")

natively = pytest.mark.skipif(
    not native.available() or current_device().kind != "cpu", reason="native kernels attend on CPUs"
)

PROMPT = [5, 17, 3, 29, 11, 23]
FUSED, MIXED, HYBRID, UNKNOWN = "llama", "gemma3_text", "qwen3_next", "afm7"


def adapted(name: str, *, exact: bool = False) -> ModelAdapter:
    return adapt_model(
        family_configs.build(name), family_configs.config(name), current_device(), widest=64, exact=exact
    )


def kept(adapter: ModelAdapter) -> set[mx.Dtype]:
    """Of all keys and values, after a mixed launch."""
    rows = adapter.new_batch_state()
    computed(adapter, rows, rows.new(), [1, 2, 3, 4, 5])
    stored = [storage for group in rows.groups for storage in group.storages]
    return {array.dtype for storage in stored for array in (*storage.keys, *storage.values)}


@pytest.mark.cpus
@natively
@pytest.mark.parametrize("name", [FUSED, MIXED, HYBRID])
def test_native_attention_keeps_keys_and_values_in_16_bits(name: str) -> None:
    assert kept(adapted(name)) == {mx.float16}


@pytest.mark.cpus
@natively
@pytest.mark.parametrize("name", [FUSED, MIXED, HYBRID])
def test_a_stated_number_format_keeps_them_as_they_are_computed(name: str) -> None:
    assert kept(adapted(name, exact=True)) == {mx.float32}


def test_keys_and_values_that_mlx_reads_stay_as_they_are_computed() -> None:
    assert adapted(UNKNOWN).kept is None


@pytest.mark.cpus
@natively
@pytest.mark.parametrize("name", [FUSED, MIXED])
def test_half_the_bytes_take_half_the_memory(name: str) -> None:
    narrow, wide = adapted(name).footprint, adapted(name, exact=True).footprint
    assert [(window, 2 * size) for window, size in narrow.groups] == list(wide.groups)


@pytest.mark.cpus
@natively
@pytest.mark.parametrize("kind", ["llama", "hybrid", "window", "moe"])
def test_rounding_keys_and_values_changes_little(kind: str) -> None:
    tokens = [int(token) for token in np.random.default_rng(5).integers(1, 90, 200)]

    def logits(exact: bool) -> np.ndarray:
        return np.array(prompt_logits(tiny.adapter(kind, exact=exact), tokens))

    near, exact = logits(False), logits(True)
    assert 0 < np.abs(near - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", list(tiny.CONFIGS))
def test_rows_of_unlike_length_share_launches_on_a_gpu_and_no_family_is_blamed(kind: str) -> None:
    made = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], engines.GPU)
    assert (made.ragged, made.mixed) == (True, True)
    assert not any("this family" in note for note in made.notes)


WAVERING = {
    **tiny.CONFIGS["kernel-hybrid"],
    **{"model_type": "qwen3_5_moe", "full_attention_interval": 2, "norm_topk_prob": True},
    **{"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
METAL = Device("metal", "a CPU that follows Metal's rules", 1 << 34)


def wavering(seed: int, bits: int | None = 4) -> Any:
    """Qwen3.5 MoE whose experts are nearly alike to its routers: rounding decides who answers."""

    def random_weights(path: str, weight: mx.array) -> mx.array:
        if path.endswith("mlp.gate.weight"):
            return mx.broadcast_to(weight[:1], weight.shape) + 0.002 * weight
        return weight

    def is_packed(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and not path.endswith("mlp.gate")

    model = random_models.build(WAVERING, seed=seed, spread=0.2)
    model.update(tree_map_with_path(random_weights, model.parameters()))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=is_packed)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(
    ("seed", "device"),
    [(0, METAL), pytest.param(1, METAL, marks=pytest.mark.slow), (0, engines.GPU)],
    ids=["0", "1", "cuda"],
)
def test_a_mixture_whose_router_wavers_is_loaded_and_shares_launches(seed: int, device: Device) -> None:
    made = adapt_model(wavering(seed), WAVERING, device)
    notes = [note for note in made.notes if "multiples of 64" not in note]  # as experts here are not
    assert (made.ragged, made.mixed, notes) == (True, True, [])


def test_a_mixture_that_wavers_and_that_our_attention_gets_wrong_does_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = MixedAttention._forward_mixed
    monkeypatch.setattr(MixedAttention, "_forward_mixed", lambda *args: -computed(*args))
    made = adapt_model(wavering(0), WAVERING, METAL)
    assert (made.ragged, made.mixed) == (True, False)
    [note] = made.notes
    assert re.search(r"computed one after another: .* cannot mix them \(logits differ by 0\.\d+ of their range\)", note)


@pytest.mark.cpus
@natively
@pytest.mark.parametrize(
    ("kind", "ours", "kept", "said"),
    [
        ("llama", FusedLayers, MixedAttention, "layers run one after another"),
        ("hybrid", NativeRecurrence, MixedAttention, "recurrent layers run by the family's own modules"),
        ("hybrid", MixedAttention, NativeRecurrence, "attention run by the family's own modules"),
    ],
    ids=["layers", "recurrent", "attention"],
)
def test_modules_of_ours_that_compute_something_else_are_found_named_and_not_used(
    kind: str, ours: type[nn.Module], kept: type[nn.Module], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = ours.__call__

    def wrong(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = own(self, x, *args, **kwargs)
        return -y if any(isinstance(each, LayerState) for each in (*args, *kwargs.values())) else y

    monkeypatch.setattr(ours, "__call__", wrong)
    made = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], current_device())
    assert not any(isinstance(module, ours) for module in made.model.modules())
    assert any(isinstance(module, kept) for module in made.model.modules()), "other parts stay as they are"
    [note] = [note for note in made.notes if "answers differ from mlx-lm's own by" in note]
    assert note.startswith(f"{said}, slower: otherwise")
    assert logits_gap(prompt_logits(made, PROMPT), tiny.build(kind)(mx.array([PROMPT]))[0]) < 1e-3


@pytest.mark.parametrize("device", [current_device(), METAL, engines.GPU], ids=["here", "metal", "cuda"])
@pytest.mark.parametrize("name", [FUSED, MIXED, "qwen3_moe"])
def test_modules_that_were_swapped_can_be_put_back(name: str, device: Device) -> None:
    made = adapt_model(family_configs.build(name), family_configs.config(name), device, widest=64)
    restore_mlx_lm_modules(made.model)
    assert not any(isinstance(module, MixedAttention | JoinedMLP | FusedLayers) for module in made.model.modules())
    plain = replace(made, kept=None, steps=None)
    assert logits_gap(prompt_logits(plain, PROMPT), family_configs.build(name)(mx.array([PROMPT]))[0]) < 1e-3


@pytest.mark.parametrize("device", [current_device(), METAL], ids=["here", "metal"])
def test_attention_that_is_mlx_lms_own_is_named_with_what_it_costs(device: Device) -> None:
    made = adapt_model(family_configs.build(UNKNOWN), family_configs.config(UNKNOWN), device, widest=64)
    [note] = [note for note in made.notes if "attention by the family's own modules" in note]
    assert "(Attention), slower: each step copies keys and values out of their pages" in note
    for known in (FUSED, MIXED, HYBRID):
        other = adapt_model(family_configs.build(known), family_configs.config(known), device, widest=64)
        assert not [note for note in other.notes if "mlx-lm's own" in note]


@pytest.fixture(scope="module")
def uneven_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed Gemma 3 with norms that make some activations far larger than others, as those of real ones do."""
    made = tiny_model("gemma3", kinds=[Kind.Q4_K, Kind.Q6_K], layers=6)
    rng = np.random.default_rng(0)
    for name, (kind, shape, _) in list(made.tensors.items()):
        if name.endswith("norm.weight"):
            made.tensors[name] = (kind, shape, np.exp(0.3 * rng.standard_normal(shape)).astype(np.float32))
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "model").mkdir()
    convert_gguf(made.write(folder / "gemma.gguf"), folder / "model", no_progress)
    return folder / "model"


@pytest.mark.cpus
@pytest.mark.skipif(current_device().kind != "cpu", reason="GPUs round no activations")
def test_activations_of_8_bits_do_not_keep_a_model_from_mixing_its_rows(uneven_gemma: Path) -> None:
    made = load_model_adapter(uneven_gemma, current_device())
    assert (made.ragged, made.mixed) == (True, True)
    assert not any("this family" in note for note in made.notes)


@pytest.mark.slow
def test_gemma_shares_launches_under_the_rules_of_a_gpu(uneven_gemma: Path) -> None:
    made = load_model_adapter(uneven_gemma, engines.GPU)
    assert (made.ragged, made.mixed) == (True, True)


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])
def test_gemma_answers_alike_alone_and_among_rows_of_unlike_length(
    device: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, "gemma3_text", family_configs.config("gemma3_text"))
    rng = random.Random(8)
    requests = [
        Request(
            f"r{number}",
            (tuple(rng.randrange(1, 95) for _ in range(length)),),
            max_tokens=12,
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        for number, length in enumerate((90, 2, 37, 9, 150, 61))
    ]
    engine = engines.start("gemma3_text", device=device)
    alone = [engines.text_of(engines.answer(engine, request)) for request in requests]
    streams = [engine.generate(request) for request in requests]
    together = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    engine.check()
    engine.close()
    assert together == alone


@pytest.mark.cpus
@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_the_number_formats_are_reported_as_they_are(uneven_gemma: Path) -> None:
    assert (
        str(load_model_adapter(uneven_gemma, current_device()).formats) == "weights Q4_K, activations 8-bit, KV float16"
    )
    exact = load_model_adapter(uneven_gemma, current_device(), dtype="float32").formats
    assert str(exact) == "weights Q4_K, activations float32, KV float32"
    assert str(adapted("llama").formats) == "weights F32, activations float32, KV float16"
