"""What the weights of a model are called, as its config tells."""

from __future__ import annotations

from typing import Any, Final

FILE_TYPE: Final = "gguf_file_type"
"""Where the config of a converted GGUF file says what its makers call its mixture of formats."""
MOVED: Final = "gguf_moved"
"""Where it says which formats MLX lacks, each with the bits that it is held in, and the percent that values move by."""
PLAIN: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def weight_format(config: dict[str, Any], dtype: str) -> str:
    """What the weights are in the model's files, by the names that people know: Q4_K_M, 4-bit, BF16.

    `dtype` is for a config that does not say.
    """
    if isinstance(told := config.get(FILE_TYPE), str):
        return told
    packed = config.get("quantization")
    if isinstance(packed, dict) and "bits" in packed:
        mode = packed.get("mode", "affine")
        return f"{packed['bits']}-bit" if mode == "affine" else str(mode)
    stated = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    return PLAIN.get(stated, stated)


def moved_weights(config: dict[str, Any]) -> list[str]:
    """What a user should know of weights that are not held as their file has them."""
    said = config.get(MOVED)
    if not isinstance(said, dict):
        return []
    return [
        f"{kind} weights are held in {told['bits']} bits, which moves them by {told['percent']} % at most (as root "
        "mean squares)"
        for kind, told in said.items()
        if isinstance(told, dict) and told.keys() >= {"bits", "percent"}
    ]
