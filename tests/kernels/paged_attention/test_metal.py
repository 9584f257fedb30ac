"""What a Mac will compile, read by the compiler that is here: clang checks address spaces, too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ingot.kernels.gpu.kernel_source import Kernel, kernel_text
from ingot.kernels.paged_attention.inputs import paged_kernel
from ingot.kernels.recurrent import kernels as recurrent

STUB = Path(__file__).with_name("metal_stub.h")
COMPILER = shutil.which("clang++") or shutil.which("g++")
NUMBERS = dict.fromkeys(
    ("numbers", "angles", "norms", "partial", "filter", "tails", "states", "kept", "states_after", "eps"), "float"
)
INTEGERS = ("rows", "table", "after", "slots", "copies", "done", "spans", "columns")
ATTRIBUTES = {"simdgroup_index_in_threadgroup": "uint", "thread_index_in_simdgroup": "uint"}
ATTRIBUTES |= {"threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3"}
SIZES = "KEY_SIZE=64,VALUE_SIZE=80,KV_HEADS=2,PAGE=64"
TEMPLATES = {
    "write": f"{SIZES},THREADS=128",
    "turn": f"{SIZES},GROUP=3,WARPS=4,DIMS=48,NEIGHBOURS=0,NORMED=1,Q_STEP=128,VALUES_NORMED=1,KEYS_AS_VALUES=0,"
    "QUERIES_ONLY=0",
    "turn_latent": "KEY_SIZE=64,VALUE_SIZE=16,KV_HEADS=1,PAGE=64,HEADS=3,UNROTATED=32,WARPS=4,Q_ROW=144,KV_ROW=80,"
    "KV_AT=0,DIMS=16,NEIGHBOURS=1",
    "copy": f"{SIZES},THREADS=128",
    "attend": f"{SIZES},GROUP=3,SPLIT=128,GROW=0,WINDOW=9,CAPPED=1,SINKS=1,PART=3,UNROLL=4,RUN=8,WARPS=4,LATENT=1",
    "merge": f"{SIZES},GROUP=3,SPLIT=128,GROW=0,WINDOW=9,SINKS=1,THREADS=128",
    "convolve": "CHANNELS=144,TAPS=4,THREADS=128,SILU=1,GATED=0,BIASED=1,X_ROW=150",
    "advance": "KEY_SIZE=32,VALUE_SIZE=16,KEY_HEADS=1,VALUE_HEADS=5,THREADS=256,"
    "ROW=10,STRENGTH_AT=0,FACTOR_STEP=1,SLOWNESS_ROW=160,SLOWNESS_AT=0,BY_KEY=1,BOUNDED=1",
    "scan": "HEADS=4,SIZE=12,KEYS=2,STATE=32,WARPS=2,ROW=300,STEP_AT=9",
    "gate": "SIZE=96,NORM=48,ROW=300,GATE_AT=3,GATE_SPAN=96,GATE_STEP=96,NORMED=1,NORM_FIRST=1,SIGMOID=0,WEIGHTS=48,"
    "WARPS=4,TOGETHER=2",
}


def _kernel(name: str) -> Kernel:
    if name in recurrent.INPUTS:
        return recurrent.recurrent_kernel(name, returned=name in recurrent.STATES)
    return paged_kernel(name, 0 if name == "merge" else 2)


def _program(kernel: str, number: str, small: str) -> str:
    """As MLX writes it: inputs of a few numbers are `constant`, the others `device`."""
    text = kernel_text(_kernel(kernel), "metal")
    types = {**dict.fromkeys(INTEGERS, "int32_t"), **NUMBERS}
    arguments = []
    for name in text.inputs:
        place = small if name in INTEGERS or name == "numbers" else "device"
        arguments.append(f"const {place} {types.get(name, number)}* {name}")
        arguments += [f"const constant int* {name}_shape"] * (f"{name}_shape" in text.body)
        arguments += [f"const constant int64_t* {name}_strides"] * (f"{name}_strides" in text.body)
    arguments += [f"device {types.get(name, number)}* {name}" for name in text.outputs]
    arguments += [f"{kind} {name}" for name, kind in ATTRIBUTES.items() if name in text.body]
    values = dict(pair.split("=") for pair in TEMPLATES[kernel].split(","))
    template = ", ".join(["typename T", *(f"int {name}" for name in values)])
    chosen = ", ".join([number, *values.values()])
    # C++ has variables of such a kind only as static ones.
    header = text.header.replace("threadgroup float4 name", "static threadgroup float4 name")
    return (
        f"{STUB.read_text()}{header}template <{template}>\nvoid run({', '.join(arguments)}) {{\n{text.body}\n}}\n"
        f"template decltype(run<{chosen}>) run<{chosen}>;\n"
    )


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("small", ["device", "constant"])
@pytest.mark.parametrize("number", ["float", "float16_t", "bfloat16_t"])
@pytest.mark.parametrize("kernel", TEMPLATES)
def test_the_text_for_metal_is_well_formed(kernel: str, number: str, small: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(_program(kernel, number, small))
    command = [str(COMPILER), "-std=c++14", "-c", "-w", "-o", str(tmp_path / "kernel.o"), str(source)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[:3000]
