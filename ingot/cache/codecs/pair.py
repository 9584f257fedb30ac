"""A pair of codecs, one for keys and one for values. Keys are encoded around their mean.

In many models keys have a large part in common, such as a bias, which attention does not see: only differences between
keys matter to softmax. An error proportional to the whole length would drown these. So the mean of the keys, by head
and channel, is stored once, separately; a sample of the keys gives a good enough mean in less time.
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
"""Keys at most from which the mean is computed."""
CODEC_FACTORIES: dict[str, Callable[[], VectorCodec]] = {
    RAW: RawCodec,
    **{f"affine{bits}": partial(AffineCodec, bits) for bits in (8, 4)},
    **{f"turbo{bits}": partial(TurboCodec, bits) for bits in (4, 3, 2, 1)},
}


class PairCodec:
    """Encodes keys and values [1, heads, tokens, size] to arrays whose third axis is tokens, or 1 where all tokens
    share the array."""

    version: ClassVar[int] = 1
    """Of the centres; bytes of another version cannot be read."""
    centres: ClassVar[int] = 1
    """How many centres the keys have."""

    def __init__(self, name: CodecName) -> None:
        self.name = name
        self.keys, self.values = CODEC_FACTORIES[name.keys](), CODEC_FACTORIES[name.values]()

    @property
    def lossy(self) -> bool:
        return self.name.lossy

    @property
    def described(self) -> str:
        """For the keys of archives and records."""
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
        """The size of so many tokens of a layer, centres included."""
        codecs = zip((self.keys, self.values), sizes, strict=True)
        vectors = sum(codec.vector_bytes(size, dtype) for codec, size in codecs)
        return heads * (tokens * vectors + self._shared * sizes[0] * dtype.size)

    def encode(self, keys: mx.array, values: mx.array) -> EncodedParts:
        centres = self._centres_of(keys) if self._shared else ()
        return (*centres, *self.keys.encode(keys, *centres), *self.values.encode(values))

    def decode(self, arrays: EncodedParts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        centres, parts = arrays[: self._shared], arrays[self._shared :]
        keys, values = parts[: self.keys.parts], parts[self.keys.parts :]
        return self.keys.decode(keys, dtype, *centres), self.values.decode(values, dtype)

    @property
    def arrays(self) -> int:
        """How many arrays `encode` returns."""
        return self._shared + self.keys.parts + self.values.parts

    def _centres_of(self, keys: mx.array) -> EncodedParts:
        """The centres [1, heads, 1, size] that keys are encoded around."""
        sample = keys[:, :, :: -(-keys.shape[2] // MEAN_SAMPLE)]
        return (mx.mean(sample.astype(mx.float32), axis=2, keepdims=True).astype(keys.dtype),)

    @property
    def _shared(self) -> int:
        return 0 if self.name.keys == RAW else self.centres


class RecordCodec(PairCodec):
    """Encodes a record's keys around their mean or around the first of them, whichever is nearer.

    The first token of a sequence is usually an attention sink: its key is far from all others and close to most
    queries, so an error in it affects all attention. With the first key as a centre, it is restored exactly. A record
    that begins later gains one exact key, and little else.
    """

    version = 2
    centres = 2

    def _centres_of(self, keys: mx.array) -> EncodedParts:
        return (*super()._centres_of(keys), copy_array(keys[:, :, :1]))


RAW_CODEC = PairCodec(CodecName())
