"""MLX operations for Linux CPUs, in C++."""

import mlx.core  # the extension shares its array type

from ingot_native import built_for

if mlx.core.__version__ != built_for.MLX:
    raise ImportError(f"ingot_native was built for mlx {built_for.MLX}, and this is {mlx.core.__version__}")

from ingot_native._native import (
    Attention,
    Codec,
    CodedForm,
    Convolution,
    Gate,
    GatedDelta,
    GgufFile,
    Rotation,
    Scan,
    Spans,
    Stack,
    Weights,
    attend_segments,
    convolve,
    copy_tokens,
    discard,
    draw,
    file_bytes,
    file_packed,
    gated,
    gather,
    gather_gated,
    instruction_set,
    layer_norm,
    linear,
    lookup,
    reserve,
    rms_norm,
    snake,
    threads,
    use_blas,
    use_one_path,
    wide,
    write_tokens,
)

INTERFACE = 5
"""Raised whenever what is called here, or what it is given, changes: ingot takes the one that it knows alone."""

__all__ = [
    "INTERFACE",
    "Attention",
    "Codec",
    "CodedForm",
    "Convolution",
    "Gate",
    "GatedDelta",
    "GgufFile",
    "Rotation",
    "Scan",
    "Spans",
    "Stack",
    "Weights",
    "attend_segments",
    "convolve",
    "copy_tokens",
    "discard",
    "draw",
    "file_bytes",
    "file_packed",
    "gated",
    "gather",
    "gather_gated",
    "instruction_set",
    "layer_norm",
    "linear",
    "lookup",
    "reserve",
    "rms_norm",
    "snake",
    "threads",
    "use_blas",
    "use_one_path",
    "wide",
    "write_tokens",
]
