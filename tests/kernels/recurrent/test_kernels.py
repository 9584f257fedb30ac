"""Recurrent mixers as a GPU would run them, against float64; and that no bit depends on how tokens are cut."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.recurrent.kernels import RecurrentSpans, locate_states
from ingot.kernels.recurrent.mixers import DeltaKernels, DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import MixerShape
from tests.kernels.paged_attention.memory import emulated
from tests.kernels.recurrent.layers import Layer, close

pytestmark = emulated
DELTA = DeltaShape(2, 4, 16, 16, 4)
KDA = DeltaShape(2, 2, 32, 32, 4, decays_by_key=True, sigmoid_gate=True, gates_apart=True, decays_apart=True)
MAMBA = Mamba2Shape(4, 2, 16, 32, 4, 32, biased=True)
SHORT = ShortConvShape(40, 3)


@pytest.mark.parametrize(
    ("shape", "dtype", "bound"),
    [
        (DELTA, mx.float32, 1e-5),
        (DeltaShape(1, 3, 32, 48, 4), mx.float32, 1e-5),
        (DeltaShape(2, 2, 128, 128, 4), mx.bfloat16, 3e-2),
        (DeltaShape(1, 2, 256, 32, 3), mx.float16, 4e-3),
        (DeltaShape(1, 1, 96, 16, 2), mx.float32, 1e-5),
        (DeltaShape(2, 6, 16, 32, 4, interleaved=True), mx.float32, 1e-5),
        (KDA, mx.float32, 1e-5),
        (DeltaShape(2, 2, 128, 128, 4, decays_by_key=True, bounded=True, sigmoid_gate=True), mx.bfloat16, 3e-2),
        (DeltaShape(1, 2, 96, 48, 4, decays_by_key=True, decays_apart=True), mx.float16, 4e-3),
        (DeltaShape(1, 2, 16, 16, 3, bounded=True, gates_apart=True), mx.float32, 1e-5),
        (MAMBA, mx.float32, 1e-5),
        (Mamba2Shape(6, 2, 80, 128, 4, 240, biased=True), mx.bfloat16, 3e-2),  # Nemotron's
        (Mamba2Shape(3, 1, 64, 128, 4, 192, biased=True), mx.float16, 4e-3),  # Granite's
        (Mamba2Shape(2, 1, 64, 256, 4), mx.float32, 1e-5),  # Falcon's, which has no norm
        (Mamba2Shape(3, 3, 40, 64, 3, 120, norm_first=True), mx.float32, 1e-5),
        (Mamba2Shape(2, 1, 12, 16, 2, 24), mx.float32, 1e-5),
        (Mamba2Shape(44, 2, 8, 16, 2, 352), mx.float32, 1e-5),
        (SHORT, mx.float32, 1e-5),
        (ShortConvShape(300, 4, biased=True), mx.bfloat16, 3e-2),
    ],
    ids=str,
)
def test_rows_of_unlike_lengths_are_one_launch(shape: MixerShape, dtype: mx.Dtype, bound: float) -> None:
    pieces = [(0, 1, 3, 8), (1, 85, 0, 0), (86, 4, 1, 2)]
    layer = Layer(shape, 90, dtype)
    y = layer.run(pieces)
    for first, count, slot, start in pieces:
        wanted, states = layer.expected(first, count, slot, start)
        assert close(y[first : first + count], wanted, bound)
        assert not states or close(np.array(layer.states[1][slot]), states[-1], bound)
    for now, before in zip(layer.states, layer.before, strict=True):
        assert np.array_equal(np.array(now[2]), before[2]), "a slot that nobody has"


@pytest.mark.parametrize("shape", [DELTA, KDA, MAMBA, SHORT], ids=["delta", "kda", "mamba", "short"])
def test_where_kernels_run_side_by_side_states_are_outputs_with_the_same_bits(shape: MixerShape) -> None:
    pieces = [(0, 1, 3, 8), (1, 70, 0, 0), (71, 2, 1, 2)]
    layer = Layer(shape, 73, mx.bfloat16)
    y, after = layer.run_apart(pieces)
    assert all(np.array_equal(np.array(now), was) for now, was in zip(layer.states, layer.before, strict=True))
    assert np.array_equal(layer.run(pieces), y)
    for rows, states in zip(after, layer.states, strict=True):
        assert np.array_equal(rows, np.array(states[mx.array([3, 0, 1])]))


@pytest.mark.parametrize("shape", [DELTA, KDA, MAMBA, SHORT], ids=["delta", "kda", "mamba", "short"])
def test_states_are_found_by_their_addresses(shape: MixerShape) -> None:
    pieces = [(0, 2, 3, 8), (2, 3, 0, 0)]
    layer = Layer(shape, 5)
    wanted = layer.run(pieces)
    states = [np.array(part) for part in layer.states]
    layer.restart()
    run, (joint, *apart) = Emulator(), layer.given()
    places = locate_states(run, layer.states)
    found, _ = layer.kernels(run).mix(joint, RecurrentSpans.of(pieces), [places], *apart)
    assert np.array_equal(np.array(found), wanted)
    assert all(np.array_equal(np.array(now), was) for now, was in zip(layer.states, states, strict=True))


@pytest.mark.parametrize("shape", [DELTA, KDA, MAMBA, SHORT], ids=["delta", "kda", "mamba", "short"])
@given(cuts=st.lists(st.integers(1, 50), min_size=1, max_size=4), start=st.integers(0, 5), seed=st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_no_bit_depends_on_how_a_row_is_cut(shape: MixerShape, cuts: list[int], start: int, seed: int) -> None:
    total = sum(cuts)
    layer = Layer(shape, total, mx.bfloat16, seed)
    layer.before[0] = np.array(mx.array(layer.before[0]).astype(mx.bfloat16).astype(mx.float32))
    layer.restart()
    whole = layer.run([(0, total, 1, start)])
    states = [np.array(part[1]) for part in layer.states]
    layer.restart()
    found, at = [], 0
    for count in cuts:
        y = layer.run([(at, count, 1, start + at)], Emulator(seed))
        found.append(y[at : at + count])
        at += count
    assert np.array_equal(np.concatenate(found), whole)
    assert all(np.array_equal(np.array(now[1]), was) for now, was in zip(layer.states, states, strict=True))


@pytest.mark.parametrize("shape", [DELTA, KDA, MAMBA], ids=["delta", "kda", "mamba"])
def test_the_states_after_each_token_are_given_where_they_are_asked_for(shape: Any) -> None:
    layer = Layer(shape, 24)
    pieces = [(0, 3, 2, 4), (3, 17, 0, 1), (20, 4, 1, 0)]
    kept = layer.kept(pieces, keep=[True, False, True])
    assert kept.shape == (7, *shape.states[1])
    for begin, piece in ((0, pieces[0]), (3, pieces[2])):
        assert close(kept[begin : begin + piece[1]], np.array(layer.expected(*piece)[1]), 1e-5)
        assert np.array_equal(kept[begin + piece[1] - 1], np.array(layer.states[1][piece[2]]))


class WithoutBarrier(Emulator):
    def __init__(self, kernel: str, number: int, seed: int) -> None:
        super().__init__(seed)
        self._kernel, self._number = kernel, number

    def rewritten(self, text: KernelText) -> KernelText:
        if f"_{self._kernel}_" not in text.name:
            return text
        parts = text.body.split("group_barrier();")
        assert len(parts) == 3, "two barriers"
        barriers = ["" if number == self._number else "group_barrier();" for number in range(2)]
        return text._replace(body=parts[0] + barriers[0] + parts[1] + barriers[1] + parts[2])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("shape", "kernel"), [(DELTA, "advance"), (MAMBA, "scan")], ids=["delta", "mamba"])
def test_a_missing_barrier_is_found(shape: MixerShape, kernel: str, number: int) -> None:
    layer, pieces = Layer(shape, 40), [(0, 40, 1, 0)]
    right = layer.run(pieces)
    found = []
    for seed in range(1, 7):
        layer.restart()
        found.append(not np.array_equal(layer.run(pieces, WithoutBarrier(kernel, number, seed)), right))
    assert any(found)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (DeltaShape(2, 4, 8, 16, 4), "keys of 8"),
        (DeltaShape(3, 4, 16, 16, 4), "4 value heads over 3"),
        (DeltaShape(2, 4, 16, 16, 9), "over 9 tokens"),
        (DeltaShape(2, 4, 16, 16, 4, interleaved=True, decays_apart=True), "heads that lie together"),
        (Mamba2Shape(4, 2, 16, 8, 4), "states of 8"),
        (Mamba2Shape(4, 3, 16, 16, 4), "4 heads in 3 groups"),
        (Mamba2Shape(3, 1, 4, 16, 4), "12 numbers of all heads"),
        (ShortConvShape(8, 1), "over 1 tokens"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_name(shape: MixerShape, reason: str) -> None:
    assert reason in str(shape.unsupported())
    with pytest.raises(ValueError, match="int32: there are kernels for"):
        DeltaKernels(Emulator(), DELTA, mx.int32, Layer(DELTA, 1).weights)
