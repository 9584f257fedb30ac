"""Pages in fewer bits, unpacked for prompts: many queries see each of them, and one kernel less is to be kept fast."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.texts import Output, Template, Work
from ingot.kernels.paged.texts import paged_kernel
from ingot.kernels.paged_attention.shapes import CodedPages, Shape

_THREADS = 128


class UnpackedPages:
    """Memory for what some pages are unpacked to, one layer's after another's: with memory of its own for each layer,
    MLX would hold all of it until the device has come by."""

    def __init__(self, pages: mx.array, shape: Shape, dtype: mx.Dtype) -> None:
        """`pages` are their numbers, the same in all layers."""
        self._pages, self._shape = pages, shape
        keys, values = (
            mx.zeros((pages.size, shape.kv_heads, shape.page, size), dtype)
            for size in (shape.key_size, shape.value_size)
        )
        self.arrays = (keys, values)
        """[pages, kv_heads, page, size] each."""
        self._reader: mx.array | None = None

    def fill(self, run: Launcher, template: Template, coded: CodedPages, after: mx.array) -> mx.array:
        """Unpack a layer's, once the one before was read. Gives a token for who reads them."""
        freed = self.arrays[0] if self._reader is None else self._reader
        [done] = run(
            paged_kernel("unpack"),
            [self._pages, coded.constants, after, freed, coded.addresses, *self.arrays],
            Work(
                template=(*template, *coded.shape.template, ("THREADS", _THREADS)),
                groups=(self._pages.size, self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(Output((1,), mx.int32),),
            ),
        )
        return done

    def free_after(self, reader: mx.array) -> None:
        """They may be written over when this one, which was made of them, is there."""
        self._reader = reader
