"""What keys and values are put into: a codec for each, keys around their mean.

In many models keys have a large part in common, a bias say, which attention does not see: only differences between keys
matter to softmax. An error that is a share of the whole length would drown them. So the mean of keys, by
head and channel, is kept apart, once; that of some of them does as well, and takes less time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import mlx.core as mx

from ingot.cache.arrays import copy_array
from ingot.cache.codecs.codec import AffineCodec, EncodedParts, RawCodec, VectorCodec
from ingot.cache.codecs.names import RAW, CodecName
from ingot.cache.codecs.turbo import TurboCodec

MEAN_SAMPLE = 128
"""Keys that the mean is taken of, at most."""
CODEC_FACTORIES: dict[str, Callable[[], VectorCodec]] = {
    RAW: RawCodec,
    **{f"affine{bits}": partial(AffineCodec, bits) for bits in (8, 4)},
    **{f"turbo{bits}": partial(TurboCodec, bits) for bits in (4, 3, 2, 1)},
}


class PairCodec:
    """Takes keys and values [1, heads, tokens, size], and gives arrays whose third axis is tokens, or 1 where it is
    what all of them share."""

    version: ClassVar[int] = 1
    """Of what keys have in common; another one's bytes cannot be read."""
    centres: ClassVar[int] = 1
    """Arrays that keys have in common."""

    def __init__(self, name: CodecName) -> None:
        self.name = name
        self.keys, self.values = CODEC_FACTORIES[name.keys](), CODEC_FACTORIES[name.values]()

    @property
    def lossy(self) -> bool:
        return self.name.lossy

    @property
    def described(self) -> str:
        """For keys of what depends on it."""
        if not self.lossy:
            return RAW
        return f"{self.name}, version {self.version}.{self.keys.version}.{self.values.version}"

    def problem(self, sizes: tuple[int, int]) -> str | None:
        """Why heads of these sizes cannot be encoded, if so."""
        for part, codec, size in zip(("keys", "values"), (self.keys, self.values), sizes, strict=True):
            if (problem := codec.problem(size)) is not None:
                return f"{codec.name} cannot encode this model's {part}: {problem}"
        return None

    def nbytes(self, tokens: int, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> int:
        """What so many tokens of a layer take, everything counted."""
        codecs = zip((self.keys, self.values), sizes, strict=True)
        vectors = sum(codec.vector_bytes(size, dtype) for codec, size in codecs)
        return heads * (tokens * vectors + self._shared * sizes[0] * dtype.size)

    def encode(self, keys: mx.array, values: mx.array) -> EncodedParts:
        around = self._in_common(keys) if self._shared else ()
        return (*around, *self.keys.encode(keys, *around), *self.values.encode(values))

    def decode(self, arrays: EncodedParts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        around, rest = arrays[: self._shared], arrays[self._shared :]
        own, others = rest[: self.keys.parts], rest[self.keys.parts :]
        return self.keys.decode(own, dtype, *around), self.values.decode(others, dtype)

    @property
    def arrays(self) -> int:
        """How many arrays `encode` gives."""
        return self._shared + self.keys.parts + self.values.parts

    def _in_common(self, keys: mx.array) -> EncodedParts:
        """What keys are encoded around [1, heads, 1, size]: as many as there are centres."""
        some = keys[:, :, :: -(-keys.shape[2] // MEAN_SAMPLE)]
        return (mx.mean(some.astype(mx.float32), axis=2, keepdims=True).astype(keys.dtype),)

    @property
    def _shared(self) -> int:
        return 0 if self.name.keys == RAW else self.centres


class RecordCodec(PairCodec):
    """Of a record's keys, which are encoded around their mean or around the first of them, whichever is nearer.

    Where models have nothing to look at, they look at the first token of all: its key is far from all others and close
    to most queries, so that an error in it is an error in every attention. Here that key comes back exactly. A
    record that begins later has one more exact key, and little else.
    """

    version = 2
    centres = 2

    def _in_common(self, keys: mx.array) -> EncodedParts:
        return (*super()._in_common(keys), copy_array(keys[:, :, :1]))


RAW_CODEC = PairCodec(CodecName())
