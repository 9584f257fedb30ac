"""How weights are packed: the forms that MLX has, and nothing between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.errors import ConfigError

AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)
FIXED: Final = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Modes of one form: bits, and weights that share a scale."""
MODES: Final = ("affine", *FIXED)


@dataclass(frozen=True, slots=True)
class Packing:
    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.mode == "affine" else self.mode


def packing(mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> Packing:
    """What was asked for, with what was not said as it is usually. Raises ConfigError for what MLX does not have."""
    if mode not in MODES:
        raise ConfigError(f"--mode must be one of {', '.join(MODES)}, not {mode!r}")
    if mode in FIXED:
        if (bits or FIXED[mode][0], group_size or FIXED[mode][1]) != FIXED[mode]:
            has = f"{FIXED[mode][0]} bits in groups of {FIXED[mode][1]}"
            raise ConfigError(f"--mode {mode} has {has}; leave out --bits and --group-size")
        return Packing(mode, *FIXED[mode])
    made = Packing(mode, 4 if bits is None else bits, 64 if group_size is None else group_size)
    if made.bits not in AFFINE_BITS:
        raise ConfigError(f"--bits must be one of {_listed(AFFINE_BITS)}, not {made.bits}")
    if made.group_size not in AFFINE_GROUPS:
        raise ConfigError(f"--group-size must be one of {_listed(AFFINE_GROUPS)}, not {made.group_size}")
    return made


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
