"""`python -m ingot.cli.probe_mlx [FOLDER]`: facts about mlx on this machine, and notes on what of the model in a folder
runs slower than it could, as one JSON object on stdout.

It is a separate process, so that `doctor` survives an mlx that cannot be loaded, and never loads it itself.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.kernels.device import Device

MATRIX_SIDE = 512


def probe_device() -> dict[str, object]:
    from ingot.kernels import device
    from ingot.kernels.cpu import fastblas, native

    fast = fastblas.install()  # before mlx, which binds its BLAS when it is loaded
    here = device.current_device()
    return {
        "version": importlib.metadata.version("mlx"),
        "kind": here.kind,
        "name": here.name,
        "memory": here.memory,
        "gflops": _measure_gflops(),
        "fast_blas": fast,
        "blas_advice": fastblas.advice() if here.kind == "cpu" else None,
        "native": native.describe() if here.kind == "cpu" else None,
        "native_advice": native.advice() if here.kind == "cpu" else None,
        "paged": _check_paged_attention(here) if here.kind != "cpu" else None,
        "delta": _check_gated_delta(here) if here.kind != "cpu" else None,
        **_compiler_status(here),
    }


def _check_paged_attention(here: Device) -> str | None:
    """What is wrong with the GPU's attention kernels, for the shape of most models; None if they are right."""
    import mlx.core as mx

    from ingot.kernels.paged_attention.selfcheck import check_paged_attention
    from ingot.kernels.paged_attention.shapes import AttentionShape

    return check_paged_attention(
        here, AttentionShape(heads=8, kv_heads=2, key_size=128, value_size=128), mx.float16, scale=128**-0.5, slabs=4
    )


def _check_gated_delta(here: Device) -> str | None:
    """The same for the gated delta rule, with Qwen's shape."""
    import mlx.core as mx

    from ingot.kernels.recurrent.mixers import DeltaShape
    from ingot.kernels.recurrent.selfcheck import check_recurrent_kernels

    return check_recurrent_kernels(
        here, DeltaShape(key_heads=2, value_heads=4, key_size=128, value_size=128, taps=4), mx.bfloat16
    )


def _compiler_status(here: Device) -> dict[str, str | None]:
    """Which kernels were compiled; empty if MLX compiles them."""
    from ingot.kernels.gpu.launcher import compilation_stats

    stats = compilation_stats(here) if here.kind == "cuda" else None
    return {} if stats is None else {"compiled": str(stats), "compiled_slower": stats.slower}


def _measure_gflops() -> float:
    """Of a float32 matrix product, after a warm-up."""
    import mlx.core as mx

    left, right = mx.random.normal((MATRIX_SIDE, MATRIX_SIDE)), mx.random.normal((MATRIX_SIDE, MATRIX_SIDE))
    mx.eval(left, right, left @ right)
    started = time.perf_counter()
    mx.eval(left @ right)
    return 2 * MATRIX_SIDE**3 / (time.perf_counter() - started) / 1e9


def slower_parts(folder: Path) -> list[str]:
    """Notes on what of a model would run slower than it could, without loading it."""
    from ingot.models.report import model_notes_before_loading

    try:
        return model_notes_before_loading(folder)
    except (Exception, SystemExit) as error:  # from the code of a hundred families
        return [f"it cannot be examined: {' '.join(str(error).split())[:200] or type(error).__name__}"]


if __name__ == "__main__":
    print(
        json.dumps(
            {**probe_device(), "slower": [note for folder in sys.argv[1:] for note in slower_parts(Path(folder))]}
        )
    )
