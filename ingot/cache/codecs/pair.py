"""What keys and values of a record are put into: a codec for each, keys around their mean.

In many models keys have a large part in common, a bias say, which attention does not see: only differences between keys
matter to softmax. An error that is a share of the whole length would drown them. So the mean of a record's keys, by
head and channel, is kept apart, once; that of some of them does as well, and takes less time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ingot.cache.codecs.affine import Affine
from ingot.cache.codecs.codec import Codec, Parts, Raw
from ingot.cache.codecs.names import RAW, CodecName
from ingot.cache.codecs.turbo import Turbo

SAMPLE = 128
"""Keys that the mean is taken of, at most."""
CODECS: dict[str, Callable[[], Codec]] = {
    RAW: Raw,
    **{f"affine{bits}": partial(Affine, bits) for bits in (8, 4)},
    **{f"turbo{bits}": partial(Turbo, bits) for bits in (4, 3, 2, 1)},
}


class PairCodec:
    """Takes keys and values [1, heads, tokens, size], and gives arrays whose third axis is tokens, or 1 where it is
    what all of them share."""

    def __init__(self, name: CodecName) -> None:
        self.name = name
        self.keys, self.values = CODECS[name.keys](), CODECS[name.values]()

    @property
    def lossy(self) -> bool:
        return self.name.lossy

    @property
    def described(self) -> str:
        """For keys of what depends on it."""
        if not self.lossy:
            return RAW
        return f"{self.name}, version {self.keys.version}.{self.values.version}"

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
        return heads * (tokens * vectors + (sizes[0] * dtype.size if self._centred else 0))

    def encode(self, keys: mx.array, values: mx.array) -> Parts:
        centre = None
        if self._centred:
            some = keys[:, :, :: -(-keys.shape[2] // SAMPLE)]
            centre = mx.mean(some.astype(mx.float32), axis=2, keepdims=True).astype(keys.dtype)
        around = () if centre is None else (centre,)
        return (*around, *self.keys.encode(keys, centre), *self.values.encode(values))

    def decode(self, arrays: Parts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        centre, rest = (arrays[0], arrays[1:]) if self._centred else (None, arrays)
        own, others = rest[: self.keys.parts], rest[self.keys.parts :]
        return self.keys.decode(own, dtype, centre), self.values.decode(others, dtype)

    @property
    def arrays(self) -> int:
        """How many arrays `encode` gives."""
        return self._centred + self.keys.parts + self.values.parts

    @property
    def _centred(self) -> bool:
        return self.name.keys != RAW


RAW_CODEC = PairCodec(CodecName())
