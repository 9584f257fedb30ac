"""What an NVIDIA GPU will compile, by its own compiler where that is at hand: no device is needed for it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.decode_graph.kernels import (
    JointNorm,
    NormWeights,
    ResidualNorm,
    gate_heads,
    gate_states,
    post_inputs,
    take_heads,
    take_result,
)
from ingot.kernels.dense_matmul.kernels import DTYPES as DENSE_DTYPES
from ingot.kernels.dense_matmul.kernels import DenseProduct
from ingot.kernels.device import Device
from ingot.kernels.gpu import launcher
from ingot.kernels.gpu.kernel_source import (
    TYPES,
    Kernel,
    KernelKind,
    LaunchConfig,
    LaunchRehearsal,
    OutputSpec,
    Prelude,
    cuda_program,
)
from ingot.kernels.gpu.launcher import CudaLauncher, MlxLauncher, compilation_stats, kernel_launcher
from ingot.kernels.gpu.nvrtc import CubinCache, Nvrtc, NvrtcError
from ingot.kernels.moe.kernels import ExpertPlaces, ExpertRouter, RouterShape, place_experts
from ingot.kernels.packed_matmul.kernels import (
    DTYPES,
    FLOAT_FORMATS,
    GatedExpertWeights,
    PackedFormat,
    PackedProduct,
    PackedWeights,
    UnpackScratch,
)
from ingot.kernels.paged_attention.inputs import KernelRows, KVSlabs, page_copies, token_slots
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import RopeKernel, RopeShape
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import KERNELS, MixerShape, random_weights
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, needs_compiler
from tests.kernels.paged_attention.memory import START, VECTORS


class Verbose(Nvrtc):
    """Keeps what the assembler says."""

    said = ""

    def options(self, architecture: str) -> tuple[str, ...]:
        return (*super().options(architecture), "--ptxas-options=-v")

    def _taken(self, program: ctypes.c_void_p, what: str) -> bytes:
        if what == "CUBIN":
            self.said = self._said(program)
        return super()._taken(program, what)


@cache
def compiler() -> Verbose | None:
    try:
        found = Verbose.find()
    except NvrtcError:
        return None
    assert isinstance(found, Verbose)
    return found


WITHOUT_MORE = ("multiply", "stream_multiply", "stream_multiply_parted")
"""Products that nothing becomes of."""

only_cuda = pytest.mark.skipif(compiler() is None, reason="needs NVRTC")


def paged(dtype: mx.Dtype, tuning: AttentionTuning, size: int, count: int = 8) -> dict[str, KernelKind]:
    run, start = LaunchRehearsal(), mx.zeros(1, mx.int32)
    slab = mx.zeros((1, 2, 64, size), dtype)
    attention = PagedAttention(run, tuning, AttentionShape(8, 2, size, size), dtype, scale=1.0, cap=9.0, window=700)
    slabs, keys = KVSlabs([slab], [slab]), mx.zeros((1, 2, size), dtype)
    attention.write(keys, keys, token_slots([(0, 0)]), slabs, start)
    attention.copy(page_copies([(0, 0, 1)]), slabs, start)
    attention.attend(mx.zeros((count, 8, size), dtype), KernelRows.of([[0] * 10], [600], counts=[count]), slabs, start)
    turned = RopeShape(AttentionShape(8, 2, size, size), dims=size // 2, normed=True)
    RopeKernel(run, tuning, turned, dtype, [(None, 1e-6)] * 2)(
        mx.zeros((1, 12 * size), dtype), mx.zeros((1, size // 2)), token_slots([(0, 0)]), slabs, start
    )
    return {kind.kernel.name: kind for kind in run.kinds}


RECURRENT: dict[str, MixerShape] = {
    "qwen": DeltaShape(16, 32, 128, 128, 4),
    "qwen-next": DeltaShape(16, 32, 128, 128, 4, interleaved=True),
    "kimi": DeltaShape(32, 32, 128, 128, 4, decays_by_key=True, sigmoid_gate=True, gates_apart=True, decays_apart=True),
    "nemotron": Mamba2Shape(128, 8, 80, 128, 4, 1280, biased=True),
    "granite": Mamba2Shape(48, 1, 64, 128, 4, 3072, biased=True),
    "falcon": Mamba2Shape(24, 1, 64, 256, 4, biased=True),
    "lfm": ShortConvShape(2048, 3),
}


def recurrent(shape: MixerShape, dtype: mx.Dtype) -> list[KernelKind]:
    run, (joint, *apart) = LaunchRehearsal(), (mx.zeros((1, width), dtype) for width in (shape.width, *shape.apart))
    kernels = KERNELS[type(shape)](run, shape, dtype, random_weights(shape, np.random.default_rng(0)))
    spans = RecurrentSpans.of([(0, 1, 0, 0)])
    for states in ([mx.zeros((1, *sizes)) for sizes in shape.states], [mx.zeros(8, mx.int32)]):
        kernels.mix(joint, spans, states, *apart)
    return [*run.kinds]


def packed(dtype: mx.Dtype, packing: PackedFormat, outputs: int, rows: int, groups: int = 64) -> dict[str, KernelKind]:
    run = LaunchRehearsal()
    factors = mx.zeros((1, outputs, groups), packing.scale_dtype(dtype))
    words = mx.zeros((1, outputs, groups * packing.group * packing.bits // 32), mx.int32)
    experts = PackedWeights.of(packing, words, factors, factors if packing.affine else None, dtype=dtype)
    product, x = PackedProduct(run, packing, dtype), mx.zeros((rows, experts.columns), dtype)
    product(x, experts.part(0))
    chosen, biases = mx.zeros(rows, mx.int32), (mx.zeros((1, outputs), dtype),) * 2
    product.gather(x, experts, chosen)
    product.gather_gated(x, GatedExpertWeights(experts, experts, "clipped", mx.zeros(2), biases), chosen)
    UnpackScratch(run, mx.zeros(1, dtype)).unpacked(x, experts.part(0))
    return {kind.kernel.name: kind for kind in run.kinds}


def dense(rows: int, outputs: int, columns: int, dtype: mx.Dtype = mx.bfloat16) -> dict[str, KernelKind]:
    run = LaunchRehearsal()
    product, x, weight = DenseProduct(run), mx.zeros((rows, columns), dtype), mx.zeros((outputs, columns), dtype)
    product(x, weight, bias=mx.zeros(outputs, dtype), residual=mx.zeros((rows, outputs), dtype))
    product(x, weight)
    product.gated(x, weight)
    return {kind.kernel.name: kind for kind in run.kinds}


def assembled(kind: KernelKind) -> str:
    """What the assembler says of it."""
    nvrtc, made = compiler(), cuda_program(kind)
    assert nvrtc is not None
    assert nvrtc.compiled(made.name, made.source, "sm_90a").startswith(b"\x7fELF")
    if "registers" not in nvrtc.said:
        pytest.skip("the compiler knew the program, and its assembler said nothing")
    return nvrtc.said


@only_cuda
@pytest.mark.parametrize("name", ["locate", "write", "turn", "copy", "attend", "merge"])
def test_kernels_over_pages_compile_and_keep_their_numbers_in_registers(name: str) -> None:
    assert " 0 bytes spill stores" in assembled(paged(mx.bfloat16, VECTORS, 128)[name])


@only_cuda
@pytest.mark.parametrize(("size", "count", "groups"), [(64, 8, 4), (128, 4, 4), (128, 8, 3), (128, 16, 2), (256, 8, 2)])
def test_matrix_units_keep_sums_in_registers_and_groups_stand_side_by_side(size: int, count: int, groups: int) -> None:
    said = assembled(paged(mx.bfloat16, TUNINGS["cuda"], size, count)["attend_wide"])
    assert " 0 bytes spill stores" in said
    registers, shared = (int(re.findall(rf"(\d+) {what}", said)[0]) for what in ("registers", "bytes smem"))
    assert min(65536 // (128 * (registers + 7 & ~7)), 228 * 1024 // (shared + 1024)) >= groups, "on one processor"


@only_cuda
def test_matrix_units_take_halves() -> None:
    assert " 0 bytes spill stores" in assembled(paged(mx.float16, TUNINGS["cuda"], 128)["attend_wide"])


@only_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_mixers_compile_and_keep_their_states_in_registers(name: str, dtype: mx.Dtype) -> None:
    for kind in recurrent(RECURRENT[name], dtype):
        assert " 0 bytes spill stores" in assembled(kind), kind.kernel.name


@only_cuda
@pytest.mark.parametrize(("outputs", "rows", "groups"), [(4096, 1, 2), (4096, 16, 2), (28672, 1, 2), (28672, 16, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_packed_weights_leave_room_for_groups(bits: int, outputs: int, rows: int, groups: int) -> None:
    said = assembled(packed(mx.bfloat16, PackedFormat(bits, 64), outputs, rows)["multiply"])
    assert " 0 bytes spill stores" in said
    assert 65536 // (256 * (int(re.findall(r"(\d+) registers", said)[0]) + 7 & ~7)) >= groups, "on one processor"


@only_cuda
@pytest.mark.parametrize("name", ["multiply", "gather", "unpack"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_packed_weights_keep_their_numbers_in_registers(dtype: mx.Dtype, name: str) -> None:
    assert " 0 bytes spill stores" in assembled(packed(dtype, PackedFormat(5, 64), 4096, 9)[name])


@only_cuda
@pytest.mark.parametrize("name", ["multiply", "gather", "gather_gated_biased", "unpack"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", FLOAT_FORMATS, ids=str)
def test_products_with_floats_of_few_bits_keep_their_numbers_in_registers(
    packing: PackedFormat, dtype: mx.Dtype, name: str
) -> None:
    for columns in (4096, 2880):  # of which GPT-OSS has some, and other kernels
        kind = packed(dtype, packing, 2880, 9, columns // packing.group)[name]
        assert " 0 bytes stack frame, 0 bytes spill stores" in assembled(kind)


@only_cuda
@pytest.mark.parametrize("columns", [4096, 4104])
@pytest.mark.parametrize("outputs", [4096, 28672])
@pytest.mark.parametrize("rows", [8, 16, 17, 32])
def test_products_with_weights_of_16_bits_keep_their_sums_in_registers(rows: int, outputs: int, columns: int) -> None:
    [(name, kind)] = [each for each in dense(rows, outputs, columns).items() if each[0] in WITHOUT_MORE]
    said = assembled(kind)
    assert " 0 bytes spill stores" in said
    assert name.startswith("stream") == (rows > 16)
    for shared in re.findall(r"(\d+) bytes smem", said):
        assert int(shared) <= 48 * 1024, "or no launch takes it"


@only_cuda
@pytest.mark.parametrize("name", ["multiply_biased_added", "multiply_gated"])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_what_becomes_of_products_with_weights_of_16_bits_compiles(dtype: mx.Dtype, name: str) -> None:
    assert " 0 bytes spill stores" in assembled(dense(9, 4096, 4096, dtype)[name])


def between_parts(dtype: mx.Dtype) -> list[KernelKind]:
    """Of a decode graph, besides products and mixers."""
    run, states, words = LaunchRehearsal(), mx.zeros((2, 4096), dtype), mx.zeros(8, mx.int32)
    norm = NormWeights(mx.zeros(4096, dtype), 1e-6)
    layer_norm = norm._replace(centred=True, bias=norm.weight)
    plain = ResidualNorm(None, multiplier=0.2)
    for residual in (ResidualNorm(norm), ResidualNorm(norm, norm, clipped=True), ResidualNorm(layer_norm), plain):
        residual(run, states, states)
    router = ExpertRouter(
        run, RouterShape(128, 8, "logits", "softmax", later=True, factored=True), factors=mx.ones(128)
    )
    router(mx.zeros((2, 128), dtype), words)
    for gate in ("silu", "gelu_tanh", "gelu", "relu2"):
        gate_states(run, states, gate)
    JointNorm(norm, NormWeights(norm.weight[:1024], 1e-6))(run, mx.zeros((2, 6144), dtype))
    gate_heads(run, states.reshape(2, 32, 128), mx.zeros((2, 9216), dtype), behind_queries=True)
    gate_heads(run, states.reshape(2, 32, 128), mx.zeros((2, 32), dtype), "softplus")
    take_heads(run, states, 32, 128, 64)
    post_inputs(run, [states, mx.zeros((2, 64)), mx.zeros((2, 32)), words, words], words, words, words)
    place_experts(run, words, mx.zeros(8), ExpertPlaces(words, words, words))
    take_result(run, words, words, words, OutputSpec((1, 8), mx.int32))
    return [*run.kinds]


@only_cuda
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_what_is_between_the_parts_of_layers_compiles(dtype: mx.Dtype) -> None:
    for kind in between_parts(dtype):
        assert " 0 bytes spill stores" in assembled(kind)


H200 = Device("cuda", "H200", 1)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As far as choosing a launcher goes."""
    monkeypatch.delenv("INGOT_AS", raising=False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9, "compute_capability_minor": 0})
    monkeypatch.setattr(launcher, "DEFAULT_CUBIN_FOLDER", tmp_path / "kernels")
    kernel_launcher.cache_clear()
    yield
    kernel_launcher.cache_clear()


@needs_compiler
def test_on_cuda_kernels_are_compiled_here_for_the_very_device(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Nvrtc, "find", lambda: fake_nvrtc(tmp_path))
    run = kernel_launcher(H200)
    assert isinstance(run, CudaLauncher) and run._architecture == "sm_90a"
    assert str(compilation_stats(H200)) == "0 compiled, in 0.0 s" and (tmp_path / "kernels").is_dir()


def test_without_nvrtc_mlx_compiles_all_kernels_and_it_is_said(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Nvrtc:
        raise NvrtcError("none of libnvrtc.so.13 is found")

    monkeypatch.setattr(Nvrtc, "find", nowhere)
    assert isinstance(kernel_launcher(H200), MlxLauncher)
    done = compilation_stats(H200)
    assert done is not None and "all (none of libnvrtc.so.13 is found)" in str(done.slower)


def test_on_metal_compiling_is_not_ours(on_cuda: None) -> None:
    assert isinstance(kernel_launcher(Device("metal", "M5", 1)), MlxLauncher)
    assert compilation_stats(Device("metal", "M5", 1)) is None


@needs_compiler
def test_a_folder_that_cannot_be_used_is_said_and_done_without(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").touch()
    monkeypatch.setattr(Nvrtc, "find", lambda: fake_nvrtc(tmp_path))
    assert isinstance(kernel_launcher(H200), CudaLauncher)
    assert "compiled kernels are not kept" in caplog.text


@pytest.mark.parametrize("prelude", ["cuda", "metal"])
def test_a_kernel_is_made_once_and_called_with_threads_not_groups(
    prelude: Prelude, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    called: dict[str, dict[str, Any]] = {}

    def make(**options: Any) -> Any:
        def run(**call: Any) -> list[mx.array]:
            called.setdefault(options["name"].split("_")[2], call)
            return list(map(mx.zeros, call["output_shapes"], call["output_dtypes"]))

        made.append(options)
        return run

    monkeypatch.setattr(mx.fast, f"{prelude}_kernel", make)
    slabs = KVSlabs(*[[mx.zeros((2, 2, 64, 32), mx.float16)] * 3] * 2)
    attention = PagedAttention(
        MlxLauncher(prelude), TUNINGS[prelude], AttentionShape(12, 2, 32, 32), mx.float16, scale=1.0
    )
    keys = mx.zeros((5, 2, 32), mx.float16)
    for _ in range(2):
        done = attention.write(keys, keys, token_slots([(0, place) for place in range(5)]), slabs, START)
        attended = attention.attend(
            mx.zeros((3, 12, 32), mx.float16), KernelRows.of([[0, 1] * 5] * 3, [7, 9, 600]), slabs, done
        )
    assert attended.shape == (3, 12, 32) and attended.dtype == mx.float16

    names = [options["name"].split("_")[2] for options in made]
    located = ["locate"] if prelude == "cuda" else []
    assert names == [*located, "write", "attend", "merge"], "once each"
    assert not any(options["ensure_row_contiguous"] for options in made), "a slab must not be copied"
    write, attend, merge = called["write"], called["attend"], called["merge"]
    assert (write["grid"], write["threadgroup"]) == ((5 * 128, 2, 1), (128, 1, 1))
    parts = 1 if prelude == "cuda" else 2
    assert (attend["grid"], attend["threadgroup"]) == ((8 * parts * 128, 2, 3), (128, 1, 1))
    assert (merge["grid"], merge["threadgroup"]) == ((128, 12, 3), (128, 1, 1))
    assert [len(call["inputs"]) for call in called.values()] == [len(options["input_names"]) for options in made]
    assert dict(attend["template"])["PART"] == (16 if prelude == "cuda" else 3)
    assert attend["output_shapes"] == [(3, 12, 8, 36), (1,)]


def test_mlx_is_asked_for_shared_memory_that_a_text_does_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **options: made.append(options) or (lambda **call: []))
    run, kernel = MlxLauncher("cuda"), Kernel("test", "none", ("x",), ("y",), "", "")
    for lent in (0, 100_000, 100_000):
        run(kernel, [mx.zeros(1)], LaunchConfig((), (1, 1, 1), 32, (), lent))
    assert [options.get("shared_memory", 0) for options in made] == [0, 100_000]


only_launcher = needs_compiler
Call = dict[str, Any]
SLABS, EVERY = 3, ["locate", "write", "copy", "attend_wide", "merge"]
HALVE = Kernel("test", "halve", ("x", "y_0", "y_1"), ("z",), "", "z[0] = x[x_strides[0] * x_shape[1]] / 2;")


class CudaLauncherDevice:
    """Stands in for MLX's launching and MLX's compiling."""

    def __init__(self, folder: Path, kept: CubinCache | None = None) -> None:
        self.calls: list[Call] = []
        self.by_mlx: list[str] = []
        self.fault: str | None = None
        self.run = CudaLauncher(fake_nvrtc(folder), "sm_90a", kept, self.compiled_by_mlx)

    def precompiled(self, **call: Any) -> list[mx.array]:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        self.calls.append(call)
        return _zeros(zip(call["output_shapes"], call["output_dtypes"], strict=True))

    def compiled_by_mlx(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        self.by_mlx.append(kernel.name)
        return _zeros(work.outputs)


def _zeros(outputs: Any) -> list[mx.array]:
    return [mx.zeros(shape, dtype) for shape, dtype in outputs]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaLauncherDevice:
    made = CudaLauncherDevice(tmp_path, CubinCache(tmp_path / "kernels"))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: made.precompiled(**call))
    return made


def halve(run: Callable[..., list[mx.array]], dtype: mx.Dtype = mx.float32, kernel: Kernel = HALVE) -> mx.array:
    x, y = mx.zeros((4, 6), dtype), mx.zeros(3, mx.int32)
    work = LaunchConfig((("T", dtype), ("N", 3), ("DEEP", True)), (2, 3, 4), 64, (OutputSpec((5,), mx.float16),))
    return run(kernel, [x, y, y], work)[0]


def every_kernel(run: Any) -> None:
    slabs = KVSlabs(*[[mx.zeros((2, 2, 64, 32), mx.bfloat16)] * SLABS] * 2)
    attention = PagedAttention(run, TUNINGS["cuda"], AttentionShape(12, 2, 32, 32), mx.bfloat16, scale=1.0)
    keys = mx.zeros((2, 5, 32), mx.bfloat16).transpose(1, 0, 2)
    done = attention.write(keys, keys, token_slots([(0, place) for place in range(5)]), slabs, START)
    done = attention.copy(page_copies([(0, 1, 3)]), slabs, done)
    attention.attend(
        mx.zeros((3, 12, 32), mx.bfloat16), KernelRows.of([[0, 1], [0, 1], [0] * 9], [7, 9, 540]), slabs, done
    )


@only_launcher
def test_arrays_are_passed_first_then_the_sizes_that_the_text_reads(device: CudaLauncherDevice) -> None:
    assert halve(device.run).shape == (5,)
    [call] = device.calls
    arrays = "const float* x, const int32_t* y_0, const int32_t* y_1, __half* z"
    function = (
        f'extern "C" __global__ void {call["name"]}({arrays}, int x_size_0, int x_size_1) {{\n'
        "const int x_shape[] = {x_size_0, x_size_1};\n"
        "const int64_t x_strides[] = {(int64_t)1 * x_size_1, (int64_t)1};\n"
        f"using T = float;\nconstexpr int N = 3;\nconstexpr bool DEEP = true;\nAFTER_OTHERS()\n{HALVE.body}\n}}\n"
    )
    assert call["compiled_source"].decode().endswith(function)
    assert call["scalars"] == [4, 6]
    assert (call["grid"], call["threadgroup"]) == ((2 * 64, 3, 4), (64, 1, 1))
    assert (call["output_shapes"], call["output_dtypes"]) == ([(5,)], [mx.float16])


@only_launcher
def test_shared_memory_that_a_text_does_not_declare_is_asked_for_at_launch(device: CudaLauncherDevice) -> None:
    x, y = mx.zeros((4, 6)), mx.zeros(3, mx.int32)
    for lent in (0, 100_000):
        device.run(HALVE, [x, y, y], LaunchConfig((), (1, 1, 1), 32, (OutputSpec((5,), mx.float16),), lent))
    assert [call["shared_memory"] for call in device.calls] == [0, 100_000]


@only_launcher
def test_every_call_fits_the_signature_that_was_compiled(device: CudaLauncherDevice) -> None:
    for _ in range(2):
        every_kernel(device.run)
    assert len(device.calls) == 2 * (SLABS + 4) and not device.by_mlx
    for call in device.calls:
        source = call["compiled_source"].decode()
        [arguments] = re.findall(rf"void {call['name']}\((.*)\) {{", source)
        inputs = [f"const {TYPES[array.dtype]}*" for array in call["inputs"]]
        outputs = [f"{TYPES[dtype]}*" for dtype in call["output_dtypes"]]
        passed = [*inputs, *outputs, *["int"] * len(call["scalars"])]
        assert [argument.rsplit(" ", 1)[0] for argument in arguments.split(", ")] == passed


@only_launcher
def test_what_a_kernel_reads_by_strides_lies_as_it_was_said(device: CudaLauncherDevice) -> None:
    every_kernel(device.run)
    write = next(call for call in device.calls if "_write_" in call["name"])
    assert write["scalars"] == [5, 2, 32, 5, 2, 32]
    for keys in write["inputs"][:2]:
        mx.eval(keys)
        assert memoryview(keys.view(mx.uint16)).c_contiguous


@only_launcher
def test_a_kind_is_compiled_once_and_one_of_another_dtype_by_itself(device: CudaLauncherDevice) -> None:
    for dtype in (mx.float32, mx.float32, mx.bfloat16, mx.float32):
        halve(device.run, dtype)
    assert (device.run.compilation.compiled, len(device.calls)) == (2, 4)
    assert len({call["name"] for call in device.calls}) == 2


@only_launcher
def test_the_next_process_finds_what_this_one_compiled(device: CudaLauncherDevice, tmp_path: Path) -> None:
    every_kernel(device.run)
    assert device.run.compilation.compiled == len(EVERY)
    again = CudaLauncherDevice(tmp_path, CubinCache(tmp_path / "kernels"))
    rehearsal = LaunchRehearsal()
    every_kernel(rehearsal)
    again.run.prepare(rehearsal.kinds)
    assert (again.run.compilation.compiled, again.run.compilation.found) == (0, len(EVERY))
    assert str(again.run.compilation).startswith(f"0 compiled, {len(EVERY)} found in {tmp_path / 'kernels'}, in ")
    assert again.run.compilation.slower is None


@only_launcher
def test_a_damaged_file_is_compiled_anew(device: CudaLauncherDevice, tmp_path: Path) -> None:
    halve(device.run)
    [file] = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    again = CudaLauncherDevice(tmp_path, CubinCache(tmp_path / "kernels"))
    halve(again.run)
    assert (again.run.compilation.compiled, again.run.compilation.found) == (1, 0)


@only_launcher
def test_what_was_prepared_is_not_compiled_when_it_is_launched(device: CudaLauncherDevice) -> None:
    rehearsal = LaunchRehearsal()
    every_kernel(rehearsal)
    assert [kind.kernel.name for kind in rehearsal.kinds] == EVERY
    device.run.prepare(rehearsal.kinds)
    seconds = device.run.compilation.seconds
    every_kernel(device.run)
    assert device.run.compilation.compiled == len(EVERY) and device.run.compilation.seconds == seconds


@only_launcher
def test_what_does_not_compile_is_compiled_by_mlx_and_the_log_says_why(
    device: CudaLauncherDevice, caplog: pytest.LogCaptureFixture
) -> None:
    broken = HALVE._replace(body="#error")
    for _ in range(2):
        halve(device.run, kernel=broken)
    assert device.by_mlx == ["halve", "halve"] and not device.calls
    assert "halve: MLX compiles this kernel, which takes longer: ingot_test_halve_" in caplog.text
    assert "error: it was to fail" in caplog.text
    assert device.run.compilation.by_mlx.keys() == {"test.halve"}


@only_launcher
def test_what_does_not_launch_is_compiled_by_mlx_and_the_log_says_why(
    device: CudaLauncherDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.fault = "Failed to load compiled kernel: no image"
    halve(device.run)
    device.fault = None
    halve(device.run)
    assert device.by_mlx == ["halve", "halve"] and not device.calls
    assert "Failed to load compiled kernel: no image" in caplog.text
    said = "MLX compiles kernels when they are first used, which takes longer: test.halve (Failed to load compiled"
    assert str(device.run.compilation.slower).startswith(said)


@only_launcher
def test_without_a_folder_kernels_are_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaLauncherDevice(tmp_path)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: device.precompiled(**call))
    halve(device.run)
    assert len(device.calls) == 1


@only_launcher
def test_numbers_of_another_width_are_another_kind_though_the_template_is_the_same(device: CudaLauncherDevice) -> None:
    work = LaunchConfig((("N", 1),), (1, 1, 1), 32, (OutputSpec((1,), mx.float32),))
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        device.run(HALVE, [mx.zeros((4, 6), dtype), *[mx.zeros(3, mx.int32)] * 2], work)
    first, second, third = (call["compiled_source"].decode() for call in device.calls)
    assert "const float* x" in first and "const __nv_bfloat16* x" in second and third == first


@only_launcher
def test_another_text_is_another_name() -> None:
    rehearsal = LaunchRehearsal()
    for dtype in (mx.float32, mx.float16):
        halve(rehearsal, dtype)
    halve(rehearsal, kernel=HALVE._replace(body="z[0] = 1;"))
    assert len({cuda_program(kind).name for kind in rehearsal.kinds}) == 3


@only_cuda
@pytest.mark.parametrize("packing", [None, PackedFormat(4, 64)], ids=str)
def test_tiles_for_prompts_keep_their_numbers_in_registers(packing: PackedFormat | None) -> None:
    kinds = dense(512, 28672, 4096) if packing is None else packed(mx.bfloat16, packing, 28672, 512)
    tiles = [kind for name, kind in kinds.items() if name.startswith("tile_multiply")]
    assert tiles and all(" 0 bytes spill stores" in assembled(kind) for kind in tiles)
