"""What a model's live states hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels import native
from ingot.kernels.device import current
from ingot.models.adapter import Adapter, adapt
from tests import engines, tiny
from tests.models import family_configs

natively = pytest.mark.skipif(not native.available() or current().kind != "cpu", reason="native kernels attend on CPUs")

FUSED, MIXED, HYBRID, LATENT = "llama", "gemma3_text", "qwen3_next", "deepseek_v3"


def adapted(name: str, *, exact: bool = False) -> Adapter:
    return adapt(family_configs.build(name), family_configs.config(name), current(), widest=64, exact=exact)


def kept(adapter: Adapter) -> set[mx.Dtype]:
    """Of all keys and values, after a mixed launch."""
    slots = adapter.new_slots()
    slots.resize(1, 64)
    with slots.mixed([(0, 1, 5)]) as layers:
        mx.eval(adapter.forward_mixed(mx.array([1, 2, 3, 4, 5]), layers, [4]), slots.arrays())
    return {array.dtype for state in slots.states if state.kind != "recurrent" for array in state.arrays()}


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
    assert 2 * narrow.append == wide.append and 2 * narrow.largest_layer == wide.largest_layer
    assert [2 * size for _, size in narrow.windows] == [size for _, size in wide.windows]


@natively
@pytest.mark.parametrize("kind", ["llama", "hybrid", "window", "moe"])
def test_rounding_keys_and_values_changes_little(kind: str) -> None:
    tokens = [int(token) for token in np.random.default_rng(5).integers(1, 90, 200)]

    def logits(exact: bool) -> np.ndarray:
        adapter = tiny.adapter(kind, exact=exact)
        slots = adapter.new_slots()
        slots.resize(1, 256)
        with slots.mixed([(0, 1, len(tokens))]) as layers:
            found = adapter.forward_mixed(mx.array(tokens), layers, list(range(len(tokens))))
            mx.eval(found, slots.arrays())
        return np.array(found)

    near, exact = logits(False), logits(True)
    assert 0 < np.abs(near - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("kind", list(tiny.CONFIGS))
def test_rows_of_unlike_length_share_launches_on_a_gpu_and_no_family_is_blamed(kind: str) -> None:
    made = adapt(tiny.build(kind), tiny.CONFIGS[kind], engines.GPU)
    assert (made.ragged, made.padded, made.mixed) == (True, True, False)
    assert not any("family" in note for note in made.notes)
