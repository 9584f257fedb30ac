"""The door to `ingot_native`, the C++ kernels for Linux CPUs. Without them everything works, slower."""

from ingot.kernels.native.attention import FEW_QUERIES, Attention, HeadNorm, attend_segments, attends_segments, rotation
from ingot.kernels.native.codecs import ROTATED, affine_codec, has_codecs, turbo_codec
from ingot.kernels.native.extension import advice, available, describe, has_narrow, has_wide, use_one_path
from ingot.kernels.native.filters import convolve, convolves, snake
from ingot.kernels.native.pages import (
    CodedSide,
    KernelChoice,
    PageTable,
    coded_form,
    copy_tokens,
    discard,
    reserve,
    spans,
    write_tokens,
)
from ingot.kernels.native.recurrent import convolution, gated_delta, scan
from ingot.kernels.native.stack import Stack
from ingot.kernels.native.tokens import draw, gated, layer_norm, rms_norm
from ingot.kernels.native.weights import (
    BITS,
    GROUPS,
    GateCurve,
    block_weights,
    covers,
    gather,
    gather_gated,
    linear,
    lookup,
    packed_weights,
    plain_weights,
)

__all__ = [
    "BITS",
    "FEW_QUERIES",
    "GROUPS",
    "ROTATED",
    "Attention",
    "CodedSide",
    "GateCurve",
    "HeadNorm",
    "KernelChoice",
    "PageTable",
    "Stack",
    "advice",
    "affine_codec",
    "attend_segments",
    "attends_segments",
    "available",
    "block_weights",
    "coded_form",
    "convolution",
    "convolve",
    "convolves",
    "copy_tokens",
    "covers",
    "describe",
    "discard",
    "draw",
    "gated",
    "gated_delta",
    "gather",
    "gather_gated",
    "has_codecs",
    "has_narrow",
    "has_wide",
    "layer_norm",
    "linear",
    "lookup",
    "packed_weights",
    "plain_weights",
    "reserve",
    "rms_norm",
    "rotation",
    "scan",
    "snake",
    "spans",
    "turbo_codec",
    "use_one_path",
    "write_tokens",
]
