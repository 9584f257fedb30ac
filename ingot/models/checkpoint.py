"""Loading weights: typed reading of a config, tensors given to a module by name, and pauses between pieces.

`read_checkpoint_tensors` reads a checkpoint's tensors by their Hugging Face names, lazily; `load_tensors` gives them to
a module that must want exactly those and raises ModelError that names what is missing, unknown or of another shape.
`CheckpointConfig` reads config.json with types. Weights are evaluated in pieces (`evaluate_in_pieces`), so that the
thread that loads a model can serve other models' requests in between (`loading_with_pauses`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.layers.modules import named_parameters

PIECE_BYTES: Final = 256 << 20
"""Bytes of weights that are read at a time."""


def _no_pause() -> None: ...


_between_pieces: ContextVar[Callable[[], None]] = ContextVar("between", default=_no_pause)


@contextmanager
def loading_with_pauses(between: Callable[[], None]) -> Iterator[None]:
    """What is loaded in the block calls `between` after each piece. It may raise, which ends the load."""
    token = _between_pieces.set(between)
    try:
        yield
    finally:
        _between_pieces.reset(token)


def pause_loading() -> None:
    """A piece is done."""
    _between_pieces.get()()


def evaluate_in_pieces(arrays: Iterable[mx.array]) -> None:
    """Read or compute arrays that are not there yet, a piece at a time."""
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            mx.eval(piece)
            piece = []
            pause_loading()
    mx.eval(piece)
    pause_loading()


MOST_TENSORS_NAMED = 5
"""Tensors that an error names; of the others it says how many they are."""
OLD_TENSOR_NAMES = ((re.compile(r"\.gamma$"), ".weight"), (re.compile(r"\.beta$"), ".bias"))


def checkpoint_files(folder: Path) -> list[Path]:
    """Kokoro's have a name of their own, and so have Whisper's that MLX's converters wrote."""
    patterns = ("model*.safetensors", "kokoro*.safetensors", "weights*.safetensors")
    return next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])


def read_checkpoint_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of the weights in `folder`. Lazy: nothing is read before it is used."""
    found: dict[str, mx.array] = {}
    for file in checkpoint_files(folder):
        try:
            loaded = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file.name} cannot be read: it is damaged or no safetensors file") from error
        assert isinstance(loaded, dict)
        found |= loaded
    if not found:
        raise ModelError(f"{folder.name} has no weights in model*.safetensors")
    return found


def with_current_names(tensors: Mapping[str, mx.array], *, drop: str = "") -> dict[str, mx.array]:
    """The tensors under the names of today, without the prefix `drop` where they carry it."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, now in OLD_TENSOR_NAMES:
            name = pattern.sub(now, name)
        result[name.removeprefix(drop)] = tensor
    return result


def load_tensors(module: nn.Module, tensors: Mapping[str, mx.array], *, unneeded: Iterable[str], whose: str) -> None:
    """Load `tensors` into `module`. Raises ModelError that names what is missing, unknown or of another shape.

    `unneeded` are patterns of tensors that are known and play no part here, such as the head of a training task.
    """
    skipped = [re.compile(pattern) for pattern in unneeded]
    wanted = dict(named_parameters(module))
    unknown = [name for name in tensors if name not in wanted and not any(pattern.search(name) for pattern in skipped)]
    problems = [
        *_problem_with("missing", [name for name in wanted if name not in tensors]),
        *_problem_with("unknown", unknown),
        *_problem_with(
            "of the wrong shape",
            [
                f"{name} {tuple(tensors[name].shape)} instead of {tuple(expected.shape)}"
                for name, expected in wanted.items()
                if name in tensors and tensors[name].shape != expected.shape
            ],
        ),
    ]
    if problems:
        raise ModelError(f"The weights of {whose} do not fit its config: {'; '.join(problems)}")
    module.load_weights([(name, tensors[name]) for name in wanted])


def _problem_with(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST_TENSORS_NAMED} more" if len(names) > MOST_TENSORS_NAMED else ""
    return [f"{what}: {', '.join(names[:MOST_TENSORS_NAMED])}{more}"]


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    config: dict[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int:
            raise self._wrong(key, value, "a whole number")
        return value

    def real(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def packing(self) -> dict[str, Any]:
        """Bits and groups of packed weights, as MLX's converters state them; empty where there are none."""
        told = self.config.get("quantization") or self.config.get("quantization_config") or {}
        if not isinstance(told, dict) or (told and type(told.get("bits")) is not int):
            raise self._wrong("quantization", told, "a form that ingot knows")
        return told

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None and default is None:
            raise ModelError(f"The model's config.json does not state {key}")
        return default if value is None else value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"The model's config.json states {key} as {value!r}, which is not {wanted}")
