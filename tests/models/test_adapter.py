"""What a model's live states hold."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.request import Request, Sampling, Stop
from ingot.kernels import native
from ingot.kernels.device import Device, current
from ingot.models.adapter import Adapter, adapt, load
from ingot.models.files.progress import silent
from ingot.models.gguf.importer import convert_gguf
from tests import engines, tiny
from tests.launches import computed, prompt_logits
from tests.models.gguf.making import tiny_model
from tests.models.layers import family_configs

natively = pytest.mark.skipif(not native.available() or current().kind != "cpu", reason="native kernels attend on CPUs")

FUSED, MIXED, HYBRID, LATENT = "llama", "gemma3_text", "qwen3_next", "deepseek_v3"


def adapted(name: str, *, exact: bool = False) -> Adapter:
    return adapt(family_configs.build(name), family_configs.config(name), current(), widest=64, exact=exact)


def kept(adapter: Adapter) -> set[mx.Dtype]:
    """Of all keys and values, after a mixed launch."""
    rows = adapter.new_rows()
    computed(adapter, rows, rows.new(), [1, 2, 3, 4, 5])
    stored = [storage for group in rows.groups for storage in group.storages]
    return {array.dtype for storage in stored for array in (*storage.keys, *storage.values)}


@natively
@pytest.mark.parametrize("name", [FUSED, MIXED, HYBRID])
def test_native_attention_keeps_keys_and_values_in_16_bits(name: str) -> None:
    assert kept(adapted(name)) == {mx.float16}


@natively
@pytest.mark.parametrize("name", [FUSED, MIXED, HYBRID])
def test_a_stated_number_format_keeps_them_as_they_are_computed(name: str) -> None:
    assert kept(adapted(name, exact=True)) == {mx.float32}


def test_keys_and_values_that_mlx_reads_stay_as_they_are_computed() -> None:
    assert adapted(LATENT).kept is None


@natively
@pytest.mark.parametrize("name", [FUSED, MIXED])
def test_half_the_bytes_take_half_the_memory(name: str) -> None:
    narrow, wide = adapted(name).footprint, adapted(name, exact=True).footprint
    assert [(window, 2 * size) for window, size in narrow.groups] == list(wide.groups)


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
    made = adapt(tiny.build(kind), tiny.CONFIGS[kind], engines.GPU)
    assert (made.ragged, made.mixed) == (True, True)
    assert not any("family" in note for note in made.notes)


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
    convert_gguf(made.write(folder / "gemma.gguf"), folder / "model", silent)
    return folder / "model"


@pytest.mark.skipif(current().kind != "cpu", reason="GPUs round no activations")
def test_activations_of_8_bits_do_not_keep_a_model_from_mixing_its_rows(uneven_gemma: Path) -> None:
    made = load(uneven_gemma, current())
    assert (made.ragged, made.mixed) == (True, True)
    assert not any("family" in note for note in made.notes)


def test_gemma_shares_launches_under_the_rules_of_a_gpu(uneven_gemma: Path) -> None:
    made = load(uneven_gemma, engines.GPU)
    assert (made.ragged, made.mixed) == (True, True)


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])
def test_gemma_answers_alike_alone_and_among_rows_of_unlike_length(
    device: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, "gemma3_text", family_configs.config("gemma3_text"))
    rng = random.Random(8)
    asked = [
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
    alone = [engines.text_of(engines.answer(engine, request)) for request in asked]
    streams = [engine.generate(request) for request in asked]
    together = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    engine.check()
    engine.close()
    assert together == alone


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_the_number_formats_are_told_as_they_are(uneven_gemma: Path) -> None:
    assert str(load(uneven_gemma, current()).formats) == "weights Q4_K, activations 8-bit, states float16"
    exact = load(uneven_gemma, current(), dtype="float32").formats
    assert str(exact) == "weights Q4_K, activations float32, states float32"
    assert str(adapted("llama").formats) == "weights F32, activations float32, states float16"
