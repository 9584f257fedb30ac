"""The emulator: it runs what a GPU would, and notices what a GPU would not forgive."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu import emulator
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelText, LaunchConfig, OutputSpec
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape
from tests.kernels.paged_attention.memory import START, Memory, Variant, emulated

BARRIER = "group_barrier();"
SEEDS = range(1, 7)
VARIANT = Variant(AttentionShape(8, 2, 64, 64), mx.float32)
BY_MATRICES = Variant(AttentionShape(8, 2, 64, 64), mx.float16, tuning=TUNINGS["cuda"])


class Broken(Emulator):
    """Changes a kernel's body before it runs."""

    def __init__(self, change: Callable[[str], str], seed: int = 0) -> None:
        super().__init__(seed)
        self._change = change

    def rewritten(self, text: KernelText) -> KernelText:
        return text._replace(body=self._change(_of_raw_pages(text.body))) if "attend" in text.name else text


def _of_raw_pages(body: str) -> str:
    """Without what is there for pages in fewer bits alone."""
    return re.sub(r"#ifdef CODED_PAGES\n.*?#endif\n", "", body, flags=re.S)


def _attended(memory: Memory, run: Emulator) -> np.ndarray:
    return np.array(memory.variant.attention(run).attend(memory.queries, memory.rows(), memory.slabs, START))


@emulated
def test_no_order_of_threads_changes_a_bit() -> None:
    memory = Memory(VARIANT, [1, 66, 513])
    in_order = _attended(memory, Emulator())
    for seed in SEEDS:
        assert np.array_equal(_attended(memory, Emulator(seed)), in_order)


def _without(line: str, number: int, count: int) -> Callable[[str], str]:
    def change(body: str) -> str:
        parts = body.split(line)
        assert len(parts) == count + 1
        return line.join(parts[: number + 1]) + line.join(["", *parts[number + 1 :]])[len(line) :]

    return change


def _found(memory: Memory, change: Callable[[str], str]) -> bool:
    right = _attended(memory, Emulator())
    return any(not np.array_equal(_attended(memory, Broken(change, seed)), right) for seed in SEEDS)


@emulated
@pytest.mark.parametrize("number", range(4))
def test_a_missing_barrier_is_found(number: int) -> None:
    assert _found(Memory(VARIANT, [66, 513]), _without(BARRIER, number, 4))


@emulated
@pytest.mark.parametrize("number", range(1, 6))  # without the first, addresses are read that nobody wrote
def test_a_missing_barrier_between_copies_and_matrix_units_is_found(number: int) -> None:
    assert _found(Memory(BY_MATRICES, [66, 513], counts=[1, 8]), _without(BARRIER, number, 6))


@emulated
@pytest.mark.parametrize("number", range(2))
def test_who_does_not_wait_for_copies_is_found(number: int) -> None:
    memory, wait = Memory(BY_MATRICES, [66, 513], counts=[1, 8]), "wait_for_copies<SLOTS - 2>();"
    assert _found(memory, _without(wait, number, 2))
    assert _found(memory, lambda body: body.replace(wait, "wait_for_copies<SLOTS - 1>();"))


@emulated
@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("if (lane == 3) { return; }", "a shuffle that some lanes of the warp never reach"),
        ("if (warp == 1) { return; }", "a barrier that some threads of the group never reach"),
        ("if (lane == 3) { shuffle_xor(0.0f, 7); }", "lanes of a warp in different shuffles"),
        ("SHARED_FLOATS(much, 9000);", "more shared memory than Metal has"),
    ],
)
def test_what_would_hang_a_gpu_fails_by_name(line: str, failure: str) -> None:
    memory = Memory(VARIANT, [513])
    head = "const int head ="
    with pytest.raises(RuntimeError, match=f"attend: {failure}"):
        _attended(memory, Broken(lambda body: body.replace(head, f"{line}\n{head}"), 5))
    check = _attended(memory, Emulator(5))
    assert np.array_equal(check, _attended(memory, Emulator())), "what failed leaves nothing behind"


@emulated
def test_shared_memory_is_what_the_launch_asked_for() -> None:
    body = "LENT_FLOATS(lent, 20000); lent[19999] = 1.0f; y[0] = lent[19999];"
    kernel = Kernel("test", "lent", ("x",), ("y",), "", body, True)
    x, output = mx.zeros(1), (OutputSpec((1,), mx.float32),)
    [y] = Emulator()(kernel, [x], LaunchConfig((), (1, 1, 1), 32, output, 80_000))
    assert y.item() == 1
    with pytest.raises(RuntimeError, match="more shared memory than the launch asked for"):
        Emulator()(kernel, [x], LaunchConfig((), (1, 1, 1), 32, output, 79_999))
    with pytest.raises(RuntimeError, match="more shared memory than a group may ask for"):
        Emulator()(kernel, [x], LaunchConfig((), (1, 1, 1), 32, output, 300_000))


@emulated
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"does not compile: (.|\n)*'queriez' was not declared"):
        _attended(Memory(VARIANT, [3]), Broken(lambda body: body.replace("queries +", "queriez +")))


@emulated
def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.tempfile, "gettempdir", lambda: str(tmp_path))
    emulator._compiled_kernel.cache_clear()
    compiled: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(
        emulator.subprocess, "run", lambda command, **kw: compiled.append(command) or run(command, **kw)
    )
    memory = Memory(Variant(AttentionShape(1, 1, 16, 16)), [3])
    _attended_once = memory.variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START)
    mx.eval(_attended_once)
    assert len(compiled) == 2, "locate and attend"
    emulator._compiled_kernel.cache_clear()
    memory.variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START)
    assert len(compiled) == 2
    emulator._compiled_kernel.cache_clear()


@emulated
def test_code_in_a_folder_that_others_may_write_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = emulator._folder()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="not this user's alone"):
        emulator._folder()


def test_kernels_run_where_something_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_launcher.cache_clear()
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    assert kernel_launcher(Device("cpu", "a CPU", 1)) is None
    if mx.default_device() == mx.cpu:
        assert kernel_launcher(Device("cuda", "no compiler here", 1)) is None
        monkeypatch.setattr(emulator.shutil, "which", lambda name: f"/usr/bin/{name}")
        assert isinstance(kernel_launcher(Device("metal", "a compiler", 1)), Emulator)
    kernel_launcher.cache_clear()


@emulated
def test_a_template_that_does_not_settle_what_arrays_hold_is_noticed() -> None:
    """A device's launcher would take them for what was there first."""
    kernel = Kernel("test", "twice", ("x",), ("y",), "", "y[0] = x[0];")
    work, run = LaunchConfig((), (1, 1, 1), 32, (OutputSpec((1,), mx.float32),)), Emulator()
    run(kernel, [mx.ones(1, mx.float32)], work)
    run(kernel, [mx.ones(1, mx.float16)], work)
    with pytest.raises(RuntimeError, match="twice: its template does not settle its arrays"):
        run(kernel, [mx.ones(1, mx.int32)], work)
