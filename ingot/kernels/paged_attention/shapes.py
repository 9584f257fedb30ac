"""What a layer's attention looks like, and how its pages lie in fewer bits: what kernels are made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ingot.kernels.gpu.texts import Template

MOST_SIZE = 256
MOST_GROUP = 16
MOST_CODED = 128
"""Of heads in fewer bits: a warp has a whole value's sums in its registers."""
PAGES = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer's attention looks like."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    page: int = 64

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        sizes = (self.key_size, self.value_size)
        if any(size % 16 or not 0 < size <= MOST_SIZE for size in sizes):
            return f"heads of {self.key_size} and {self.value_size}: sizes are multiples of 16 up to {MOST_SIZE}"
        if self.heads % self.kv_heads or self.group > MOST_GROUP:
            return f"{self.heads} heads over {self.kv_heads}: at most {MOST_GROUP} share one"
        if self.page not in PAGES:
            return f"pages of {self.page}: they may be {', '.join(map(str, PAGES))}"
        return None


@dataclass(frozen=True, slots=True)
class CodedSide:
    """Keys or values of a page in fewer bits: codes of 4 or 8 bits, and how many groups of a vector's numbers have a
    step and a least of their own; none: they are rotated, and have levels."""

    bits: int
    groups: int
    codes: int  # where they begin
    scales: int


@dataclass(frozen=True, slots=True)
class CodedShape:
    """How a head's page lies in fewer bits (`cache/page_form.py`)."""

    keys: CodedSide
    values: CodedSide
    centre: int
    head_bytes: int
    levels: tuple[float, ...] = ()  # of values that are rotated
    signs: tuple[float, ...] = ()

    def unsupported(self, shape: Shape) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        size = shape.value_size
        if shape.page != 64 or self.keys.bits not in (4, 8) or self.values.bits not in (4, 8) or not self.keys.groups:
            return "pages of 64 tokens are read in codes of 4 or 8 bits, and keys not rotated"
        if shape.key_size % 32 or size * self.values.bits % 256 or max(shape.key_size, size) > MOST_CODED:
            return (
                f"heads of {shape.key_size} and {size} in fewer bits: sizes are multiples of 32, with four bits of "
                f"64, up to {MOST_CODED}"
            )
        if not self.values.groups and (size & (size - 1) or self.values.bits != 4):
            return f"values of {size} that are rotated: sizes are powers of two, and codes have 4 bits"
        return None

    @property
    def template(self) -> Template:
        return (
            *(("KEY_BITS", self.keys.bits), ("KEY_GROUPS", self.keys.groups)),
            *(("KEY_CODES_AT", self.keys.codes), ("KEY_SCALES_AT", self.keys.scales)),
            *(("VALUE_BITS", self.values.bits), ("VALUE_GROUPS", self.values.groups)),
            *(("VALUE_CODES_AT", self.values.codes), ("VALUE_SCALES_AT", self.values.scales)),
            *(("CENTRE_AT", self.centre), ("HEAD_BYTES", self.head_bytes)),
        )

    def constants(self, size: int) -> mx.array:
        """Levels and signs, for the kernel."""
        levels, signs = self.levels or (0.0,) * 16, self.signs or (1.0,) * size
        return mx.array([*levels, *signs], mx.float32)


class CodedPages(NamedTuple):
    """A layer's slabs of pages in fewer bits, as the kernel takes them: their shape, its constants, their addresses."""

    shape: CodedShape
    constants: mx.array
    addresses: mx.array
