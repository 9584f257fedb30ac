"""Loading checkpoints: typed reading of config.json, tensors by name, and pauses between pieces.

Weights are evaluated in pieces (`evaluate_in_pieces`), so that the thread that loads a model can serve other models'
requests in between (`loading_with_pauses`). What does not fit raises ModelError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
MOST_TENSORS_NAMED: Final = 5
"""Tensors that an error names; of the others it says how many they are."""
OLD_TENSOR_NAMES: Final = ((re.compile(r"\.gamma$"), ".weight"), (re.compile(r"\.beta$"), ".bias"))
_between_pieces: ContextVar[Callable[[], None]] = ContextVar("between", default=lambda: None)


@contextmanager
def loading_with_pauses(between: Callable[[], None]) -> Iterator[None]:
    """Loading within the block calls `between` after each piece. It may raise, which ends the load."""
    token = _between_pieces.set(between)
    try:
        yield
    finally:
        _between_pieces.reset(token)


def pause_loading() -> None:
    """Call what `loading_with_pauses` calls between pieces."""
    _between_pieces.get()()


def evaluate_in_pieces(arrays: Iterable[mx.array]) -> None:
    """Evaluate lazy arrays, a piece at a time."""
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            mx.eval(piece)
            piece = []
            pause_loading()
    mx.eval(piece)
    pause_loading()


def checkpoint_files(folder: Path) -> list[Path]:
    """Kokoro's have names of their own, and so have Whisper's that MLX's converters wrote."""
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


def with_current_names(
    tensors: Mapping[str, mx.array], *, drop: str = "", renamed: Sequence[tuple[re.Pattern[str], str]] = ()
) -> dict[str, mx.array]:
    """The tensors under their current names, without the prefix `drop` where they have it."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, now in (*OLD_TENSOR_NAMES, *renamed):
            name = pattern.sub(now, name)
        result[name.removeprefix(drop)] = tensor
    return result


def load_tensors(module: nn.Module, tensors: Mapping[str, mx.array], *, unneeded: Iterable[str], whose: str) -> None:
    """Load `tensors` into `module`. Raises ModelError that names what is missing, unknown or of another shape.

    `unneeded` are patterns of tensors that are known and not used here, such as the head of a training task.
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
        return int(self._typed(key, default, (int,), "a whole number"))

    def real(self, key: str, default: float) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def text(self, key: str, default: str) -> str:
        return str(self._typed(key, default, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, default, (bool,), "true or false"))

    def quantization(self) -> dict[str, Any]:
        """Bits and groups of quantised weights, as MLX's converters state them; empty where there are none."""
        stated = self.config.get("quantization") or self.config.get("quantization_config") or {}
        if not isinstance(stated, dict) or (stated and type(stated.get("bits")) is not int):
            raise self._wrong("quantization", stated, "a form that ingot supports")
        return stated

    def _typed(self, key: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self.config.get(key)
        if value is None and default is None:
            raise ModelError(f"The model's config.json does not state {key}")
        value = default if value is None else value
        if type(value) not in types:
            raise self._wrong(key, value, wanted)
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"The model's config.json states {key} as {value!r}, which is not {wanted}")
