"""Products with quantised weights are compared with plain operations on the device at hand: a kernel that differs or
does not compile is not used. Each kind of layer is compared once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import required_launcher
from ingot.kernels.measured import experts_part, packed_experts_part, packed_part
from ingot.kernels.packed_matmul.experts import (
    GROUPED_TUNING,
    Activation,
    Curve,
    ExpertWeights,
    GroupedExperts,
    GroupedTuning,
)
from ingot.kernels.packed_matmul.kernels import (
    PACKED_TUNING,
    ExpertCurve,
    GatedExpertWeights,
    PackedCut,
    PackedFormat,
    PackedProduct,
    PackedWeights,
    UnpackScratch,
    make_scratch,
    packed_product,
)
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases, first_wrong

MOST_SCRATCH = 1 << 30
PackedKey = tuple[PackedFormat, mx.Dtype, bool, int, tuple[PackedCut, ...], int]
"""Layers with the same key share a verdict: the weights' format, the activations' dtype, whether they are experts, the
columns, how outputs are tiled, and how many the last tile lacks."""


GatedKey = tuple[PackedKey, ExpertCurve | None, bool]
"""The same of experts with gates, and whether they have biases."""


class CheckedPacked(Verdicts[PackedKey | GatedKey | PackedFormat, bool]):
    """The packed products of a device. Metal uses MLX's."""

    scratch: UnpackScratch | None = None

    def supports(self, packing: PackedFormat | PackedWeights) -> bool:
        """Whether there may be a kernel for this format, or for these weights."""
        reason = packing.unsupported()
        if reason is not None and self._device.kind != "metal":
            self.wrong[packing.packing if isinstance(packing, PackedWeights) else packing] = reason
        return reason is None

    def of(self, weights: PackedWeights) -> PackedProduct | None:
        """None where there is no right kernel for such weights."""
        if self._device.kind == "metal" or not self.supports(weights):
            return None
        part = packed_part if weights.experts is None else packed_experts_part
        if self._slower_parts.leave_out(part(weights.packing.bits, weights.packing.mode)):
            return None
        if not self._first_right(_packed_key(weights), [True], lambda _: check_packed_product(self._device, weights)):
            return None
        return packed_product(self._device, weights.packing, weights.dtype)

    def gated_experts(self, experts: GatedExpertWeights) -> PackedProduct | None:
        """What multiplies by weights of experts and their gates at once; None where nothing does rightly."""
        key = (_packed_key(experts.gate), experts.curve, experts.biases is not None)
        product = self.of(experts.gate)
        if product is None or not self._first_right(key, [True], lambda _: check_gated_experts(self._device, experts)):
            return None
        return product

    def squared_experts(self, weights: PackedWeights) -> PackedProduct | None:
        """The same with what is above zero squared, and no gates."""
        product, key = self.of(weights), (_packed_key(weights), None, False)
        if product is None or not self._first_right(
            key, [True], lambda _: check_squared_experts(self._device, weights)
        ):
            return None
        return product

    def reserve(self, layers: Iterable[PackedWeights]) -> None:
        """Memory for unpacking weights for many rows: enough for the largest weights that several layers have, except
        for those over the limit. There is one output head, which rarely has many rows."""
        all_layers = [*layers]
        counted = Counter((weights.size, weights.dtype) for weights in all_layers)
        several = [key for key, count in counted.items() if count > 1 and key[0] * key[1].size <= MOST_SCRATCH]
        if self.scratch is None and several:
            size, dtype = max(several, key=lambda key: key[0])
            self.scratch = self._checked(make_scratch(self._device, size, dtype), all_layers)

    def _checked(self, scratch: UnpackScratch | None, layers: Iterable[PackedWeights]) -> UnpackScratch | None:
        """None where it is wrong for some layer."""
        kinds = {weights.packing: weights for weights in layers if scratch is not None and scratch.covers(weights)}
        for packing, weights in kinds.items():
            assert scratch is not None
            wrong = check_scratch(self._device, scratch, weights)
            if wrong is not None:
                self.wrong[packing] = wrong
                return None
        return scratch


def _packed_key(weights: PackedWeights) -> PackedKey:
    packing, outputs = weights.packing, weights.outputs
    cuts = tuple(PACKED_TUNING.cut_of(packing.bits, packing.held, outputs, eights) for eights in (1, 2))
    lacking = -outputs % (16 * max(cut.tiles for cut in cuts))
    return packing, weights.dtype, weights.experts is not None, weights.columns, cuts, lacking


ROWS = (11, 3, 1)
ENDS = 128
"""Outputs at both ends that are compared: unpacked as float32, all of them might not fit into memory."""


def check_packed_product(device: Device, weights: PackedWeights) -> str | None:
    """The first wrong product of a layer on this device; None where all are right."""
    cases = _products if weights.experts is None else _gathered
    return check_cases(
        device,
        ("packed", *_packed_key(weights)),
        lambda: packed_product(device, weights.packing, weights.dtype),
        lambda product: cases(product, weights),
    )


def check_gated_experts(device: Device, experts: GatedExpertWeights) -> str | None:
    """The first wrong product of a layer's experts and their gates."""
    weights = experts.gate
    key = _packed_key(weights), experts.curve, experts.biases is not None
    return check_cases(
        device,
        ("gated experts", *key),
        lambda: packed_product(device, weights.packing, weights.dtype),
        lambda product: _gated_experts(product, experts),
    )


def check_squared_experts(device: Device, weights: PackedWeights) -> str | None:
    """The first wrong product of a layer's experts of which what is above zero is squared."""

    def cases(product: PackedProduct) -> Iterator[Case]:
        assert weights.experts is not None
        chosen, x = mx.array([weights.experts - 1, 0, weights.experts // 2, 0], mx.int32), _random_rows(2, weights)
        above = mx.maximum(product.gather(x, weights, chosen).astype(mx.float32), 0)
        message = f"squares of experts differ for {weights}"
        yield Case(message, product.gather_squared(x, weights, chosen), above * above, 4 * BOUNDS[weights.dtype])

    key = ("squared experts", *_packed_key(weights))
    return check_cases(device, key, lambda: packed_product(device, weights.packing, weights.dtype), cases)


def check_scratch(device: Device, scratch: UnpackScratch, weights: PackedWeights) -> str | None:
    """The first wrong product with weights that are unpacked into `scratch`."""

    def cases(scratch: UnpackScratch) -> Iterator[Case]:
        x = _random_rows(max(ROWS), weights)
        # Weights are rounded, too.
        yield from _ends(f"unpack differs for {weights}", scratch.multiply(x, weights), x, weights, slack=2)

    return check_cases(
        device, ("unpacked", weights.packing, weights.dtype, weights.scales.shape), lambda: scratch, cases
    )


def _products(product: PackedProduct, weights: PackedWeights) -> Iterator[Case]:
    """Products, and gated products where there may be gates: all that layers will launch."""
    x = _random_rows(max(ROWS), weights)
    products = [product(x[:rows], weights) for rows in ROWS]
    yield from _ends(f"multiply differs for {weights}", products[0], x, weights)
    for output in products:
        message = f"a row's product depends on how many rows there are, for {weights}"
        yield Case(message, output, products[0][: output.shape[0]])
    for rows in (max(ROWS), 1) if weights.outputs % 2 == 0 else ():
        gate, other = (part.astype(mx.float32) for part in mx.split(products[0][:rows], 2, axis=-1))
        output = product.gated(x[:rows], weights)
        # Each operation rounds.
        yield Case(f"a gate differs for {weights}", output, gate * mx.sigmoid(gate) * other, 4 * BOUNDS[output.dtype])


def _gathered(product: PackedProduct, weights: PackedWeights) -> Iterator[Case]:
    assert weights.experts is not None
    chosen = [weights.experts - 1, 0, weights.experts // 2, weights.experts - 1]
    x = _random_rows(2, weights)
    output = product.gather(x, weights, mx.array(chosen, mx.int32))
    for i, expert in enumerate(chosen):
        own, row = output[i : i + 1], x[i // 2 : i // 2 + 1]
        yield from _ends(f"gather differs for {weights}", own, row, weights.part(expert))


def _gated_experts(product: PackedProduct, experts: GatedExpertWeights) -> Iterator[Case]:
    assert experts.gate.experts is not None
    chosen = mx.array([experts.gate.experts - 1, 0, experts.gate.experts // 2, 0], mx.int32)
    x = _random_rows(2, experts.gate)
    gate, up = (product.gather(x, weights, chosen) for weights in (experts.gate, experts.up))
    if experts.biases is not None:
        gate, up = (part + bias[chosen] for part, bias in zip((gate, up), experts.biases, strict=True))
    expected = _curved(experts, gate.astype(mx.float32), up.astype(mx.float32))
    # Each operation rounds.
    yield Case(
        f"gates of experts differ for {experts.gate}",
        product.gather_gated(x, experts, chosen),
        expected,
        4 * BOUNDS[experts.gate.dtype],
    )


def _curved(experts: GatedExpertWeights, gate: mx.array, up: mx.array) -> mx.array:
    if experts.curve == "silu":
        return gate * mx.sigmoid(gate) * up
    if experts.curve == "gelu_tanh":
        return 0.5 * gate * (1 + mx.tanh(0.79788456 * (gate + 0.044715 * gate**3))) * up
    slope, limit = experts.numbers[0], experts.numbers[1]
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(slope * gate) * (1 + mx.clip(up, -limit, limit))


def _ends(message: str, output: mx.array, x: mx.array, weights: PackedWeights, *, slack: int = 1) -> Iterator[Case]:
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        expected = x.astype(mx.float32) @ weights.part(ends).unpacked(mx.float32).T
        yield Case(message, output[:, ends], expected, slack * BOUNDS[weights.dtype])


def _random_rows(rows: int, weights: PackedWeights) -> mx.array:
    return mx.random.normal((rows, weights.columns), key=mx.random.key(7)).astype(weights.dtype)


Projections = tuple[ExpertWeights, ExpertWeights, ExpertWeights]
"""Gate, up and down."""
ExpertsKey = tuple[object, ...]
"""Layers with the same key share a verdict: the kinds of their projections, their dtype and their activation."""
EXPERT_TUNINGS = (GROUPED_TUNING, replace(GROUPED_TUNING, rows=(32, 64), fours=1, units=False))
"""The second where units that read shared memory are wrong; those that do not have registers for fewer rows."""


class CheckedExperts(Verdicts[ExpertsKey, GroupedTuning]):
    """The experts' products for many tokens on a device. Metal uses MLX's."""

    def of(
        self, projections: Projections, dtype: mx.Dtype, activation: Curve | Activation, plainly: Activation
    ) -> GroupedExperts | None:
        """None where there is no right kernel for such experts. `plainly` computes the activation by MLX."""
        if self._device.kind == "metal":
            return None
        name = activation if isinstance(activation, str) else None
        key = (dtype, name, *(weights.kind for weights in projections))
        reason = first_wrong(weights.unsupported(dtype) for weights in projections)
        if reason is not None:
            self.wrong[key] = reason
            return None

        packing = projections[0].packing
        if self._slower_parts.leave_out(experts_part(packing.bits, packing.mode)):
            return None

        def make(tuning: GroupedTuning) -> GroupedExperts:
            run = required_launcher(self._device)
            return GroupedExperts(run, *projections, dtype=dtype, activation=activation, tuning=tuning)

        def check(tuning: GroupedTuning) -> str | None:
            kind = ("experts", *key, tuning)
            return check_cases(self._device, kind, lambda: make(tuning), lambda made: _expert_cases(made, plainly))

        tuning = self._first_right(key, EXPERT_TUNINGS, check)
        return None if tuning is None else make(tuning)


TOKENS = (20, 3)


def _expert_cases(experts: GroupedExperts, plainly: Activation) -> Iterator[Case]:
    """All that layers will launch. Most tokens choose the last expert and the first, so that they are several groups of
    threads' work, and some expert is chosen by none."""
    last, most = experts.gate.experts - 1, max(TOKENS)
    chosen = mx.array([[last, last // 2 if token % 4 == 3 else 0] for token in range(most)], mx.int32)
    x = mx.random.normal((most, experts.gate.columns), key=mx.random.key(7)).astype(experts.dtype)
    outputs = [experts.with_rows(rows)(x, chosen) for rows in experts.rows]
    expected = _by_plain_operations(experts, x, chosen, plainly)
    for rows, output in zip(experts.rows, outputs, strict=True):
        # Weights and activations are rounded, too.
        yield Case(f"{rows} rows differ for {experts.gate}", output, expected, 4 * BOUNDS[experts.dtype])
        yield Case(f"a row's bits differ among {rows} rows, for {experts.gate}", output, outputs[0])
    few = experts.with_rows(experts.rows[-1])(x[: min(TOKENS)], chosen[: min(TOKENS)])
    yield Case(f"a row's bits depend on how many there are, for {experts.gate}", few, outputs[0][: min(TOKENS)])


def _by_plain_operations(experts: GroupedExperts, x: mx.array, chosen: mx.array, plainly: Activation) -> mx.array:
    """[tokens, k, outputs] in float32: for all tokens each expert that is chosen, and of them those that chose it."""
    x, found = x.astype(mx.float32), mx.zeros((*chosen.shape, experts.down.outputs))
    for expert in sorted({*np.array(chosen).ravel().tolist()}):
        gate, up = (each.multiplied(x, expert) for each in (experts.gate, experts.up))
        y = experts.down.multiplied(plainly(gate, up), expert)
        found = mx.where((chosen == expert)[..., None], y[:, None], found)
    return found
