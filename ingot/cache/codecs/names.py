"""The names of codecs. Pure Python: settings are checked before mlx is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.errors import nearest_name

RAW: Final = "raw"
CODEC_NAMES: Final = (RAW, "affine8", "affine4", "turbo4", "turbo3", "turbo2", "turbo1")
"""Each may be used alone, for both keys and values, or in a pair."""
CODEC_ALIASES: Final = {"k8v4": "affine8/turbo4"}
"""Pairs with a name of their own."""


@dataclass(frozen=True, slots=True)
class CodecName:
    """The codec of the keys and that of the values."""

    keys: str = RAW
    values: str = RAW

    def __str__(self) -> str:
        pair = f"{self.keys}/{self.values}"
        short = {meaning: name for name, meaning in CODEC_ALIASES.items()}
        return self.keys if self.keys == self.values else short.get(pair, pair)

    @property
    def lossy(self) -> bool:
        return (self.keys, self.values) != (RAW, RAW)

    @classmethod
    def parse(cls, text: str) -> CodecName:
        """Raises ValueError that lists the codecs."""
        keys, slash, values = CODEC_ALIASES.get(text, text).partition("/")
        for name in (keys, values) if slash else (keys,):
            if name not in CODEC_NAMES:
                near = nearest_name(name, (*CODEC_NAMES, *CODEC_ALIASES))
                names = f"{', '.join(CODEC_NAMES)}, {', '.join(CODEC_ALIASES)}, or KEYS/VALUES such as affine8/turbo3"
                raise ValueError(
                    f"{name!r} is no codec; known are {names}" + (f"; did you mean {near}?" if near else "")
                )
        return cls(keys, values if slash else keys)


def codec_problem(text: str) -> str | None:
    """What is wrong with a codec's name, if anything."""
    try:
        CodecName.parse(text)
    except ValueError as error:
        return str(error)
    return None
