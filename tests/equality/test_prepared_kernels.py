"""What a model's layers can ask for is met when it is loaded: nobody who waits for an answer waits for a compiler."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.speculation.lookup import LookupProposer
from ingot.kernels.dense_matmul.kernels import CheckedDense
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelKind, LaunchConfig, kernel_kind
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.models.adapter import adapt_model
from ingot.models.layers.gpu_linear import swap_dense_layers
from tests import engines, tiny
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[KernelKind]:
    """All kinds that were launched so far."""
    kinds: set[KernelKind] = set()
    launch = Emulator.__call__

    def noted(self: Emulator, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        kinds.add(kernel_kind(kernel, inputs, work))
        return launch(self, kernel, inputs, work)

    monkeypatch.setattr(Emulator, "__call__", noted)
    return kinds


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> set[KernelKind]:
    """All kinds that were to be compiled at once so far, by launchers that have met none before."""
    kernel_launcher.cache_clear()
    kinds: set[KernelKind] = set()

    prepare = Emulator.prepare

    def noted(self: Emulator, asked: Iterable[KernelKind]) -> None:
        kinds.update(asked)
        prepare(self, kinds)

    monkeypatch.setattr(Emulator, "prepare", noted)
    return kinds


def asked(turn: str) -> list[Request]:
    """Of many lengths, some of which say things again and again."""
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(95) for _ in range(length)) for length in (3, 64, 65, 110)]
    greedy = Sampling(temperature=0.0)
    return [
        Request(f"{turn}{number}", (tokens * 2,), max_tokens=14, sampling=greedy, stop=Stop(ignore_eos=True))
        for number, tokens in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", ["kernel", "kernel-packed", "kernel-window", "kernel-hybrid", "kernel-hybrid-packed"])
def test_serving_launches_no_kind_that_loading_did_not_prepare(
    kind: str, launched: set[KernelKind], prepared: set[KernelKind]
) -> None:
    engine = engines.start(
        kind, context=540, device=engines.GPU, proposers=[LookupProposer()], fixed_draft_tokens=8, cache_bytes=1 << 24
    )
    at_load = set(prepared)
    for turn in ("first", "again"):
        for stream in [engine.generate(request) for request in asked(turn)]:
            assert list(stream)
    engine.check()
    engine.close()
    assert prepared == at_load, "nothing is prepared while somebody waits"
    assert launched and launched <= prepared


@pytest.mark.parametrize("kind", ["kernel", "moe"])
def test_nor_do_packed_weights_whatever_the_number_of_rows(
    kind: str, launched: set[KernelKind], prepared: set[KernelKind]
) -> None:
    model = tiny.build(kind)
    nn.quantize(model, bits=4, group_size=32, class_predicate=_divides)
    adapter = adapt_model(model, tiny.CONFIGS[kind], engines.GPU)
    at_load = set(prepared)
    for count in (1, 2, 9, 16, 17, 64, 80):
        rows = adapter.new_batch_state()
        decoding = ForwardPart(tuple(rows.new() for _ in range(count)), 1)
        mx.eval(adapter.run(rows, mx.arange(count) % 50, [decoding]), rows.pending())
    mx.eval(adapter.run(rows, mx.arange(100) % 50, [ForwardPart((rows.new(),), 100)]), rows.pending())
    assert any(each.kernel.room == "packed" for each in launched)
    assert prepared == at_load and launched <= prepared


@pytest.mark.parametrize("biased", [False, True])
def test_nor_do_plain_weights_of_16_bits_whatever_the_number_of_rows(
    biased: bool, launched: set[KernelKind], prepared: set[KernelKind]
) -> None:
    model: Any = nn.Sequential(nn.Linear(32, 24, bias=biased), nn.Linear(24, 40, bias=False))
    model.set_dtype(mx.bfloat16)
    assert swap_dense_layers(model, CheckedDense(engines.GPU)) == 2
    at_load = set(prepared)
    for count in (1, 2, 9, 16, 17, 33, 64, 80):
        mx.eval(model(mx.zeros((count, 32), mx.bfloat16)))
    names = {each.kernel.name for each in launched}
    assert {"multiply", "stream_multiply_parted", "join_multiply"} <= names
    assert ({"multiply_biased", "join_multiply_biased"} <= names) == biased
    assert prepared == at_load and launched <= prepared


def _divides(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
