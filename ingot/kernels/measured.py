"""What `ingot doctor --measure` found slower than MLX's own on this device: a model that is loaded here does without.

The findings are one JSON file in ingot's cache folder. They are of a device, a version of ingot and one of MLX, so that
another version is measured anew. A *part* is what can be left out by itself; its name is also what users read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ingot.kernels.device import Device
from ingot.version import __version__

log = logging.getLogger("ingot.kernels")
MEASURED_FILE: Final = Path("~/.cache/ingot/measured.json")
MEASURED_VARIABLE: Final = "INGOT_MEASURED"
"""With `ignore` here nothing is left out, whatever was measured."""
MARGIN: Final = 1.1
"""How many times MLX's time a part may take. A smaller difference may be noise."""
GRAPH_MARGIN: Final = 1.3
"""The same of kernels that CUDA's decode graphs are made of: whole layers as one launch are worth that slowdown."""
_BY: Final = "on this device by `ingot doctor --measure`"

ROPE: Final = "norms and RoPE of queries and keys"
DENSE: Final = "dense products of few rows"
ROUTER: Final = "the choice of experts"
SAMPLING: Final = "sampling"
NATIVE_ATTENTION: Final = "native attention"
NATIVE_DENSE: Final = "native products of 16-bit weights"
NATIVE_NORMS: Final = "native norms"
NATIVE_GATES: Final = "native gates of MLPs"
WHOLE_LAYERS: Final = {"cuda": "decode graphs", "cpu": "native layers as one operation"}
"""How all layers of a model become one operation when it is loaded, by the kind of device."""
COMPILED_STEPS: Final = "compiled steps"
_RECURRENT: Final = {
    "DeltaShape": "gated delta nets",
    "Mamba2Shape": "Mamba 2 mixers",
    "ShortConvShape": "short convolutions",
}


_GRAPH_PARTS: Final = ("attention over pages", "packed products", ROPE, DENSE, ROUTER, *_RECURRENT.values())


def attention_part(size: int, *, latent: bool = False) -> str:
    """Attention over pages, by the size of its keys."""
    return f"attention over pages, {'latents' if latent else 'heads'} of {size}"


def prompt_attention_part(size: int, *, latent: bool = False) -> str:
    """The same of prompts."""
    return f"prompts' {attention_part(size, latent=latent)}"


def packed_part(bits: int, mode: str = "affine") -> str:
    return f"packed products of few rows, {_packing(bits, mode)}"


def packed_experts_part(bits: int, mode: str = "affine") -> str:
    """Products of few rows, each with an expert that was chosen for it."""
    return f"packed products of few rows by experts, {_packing(bits, mode)}"


def experts_part(bits: int, mode: str) -> str:
    return f"prompts through experts, {_packing(bits, mode)}"


def native_packed_part(bits: int, mode: str) -> str:
    return f"native products, {_packing(bits, mode)}"


def native_experts_part(bits: int, mode: str) -> str:
    return f"native experts, {_packing(bits, mode)}"


def recurrent_part(shape: object) -> str:
    """By the class of the shape of a recurrent mixer. Gated delta nets with a decay for each number of a key are a
    part of their own, which is not measured yet, and so is never left out."""
    by_key = getattr(shape, "decays_by_key", False)
    return f"{_RECURRENT[type(shape).__name__]}{' with decays by key' if by_key else ''}"


def native_recurrent_part(shape_name: str, *, by_key: bool = False) -> str:
    return f"native {_RECURRENT[shape_name]}{' with decays by key' if by_key else ''}"


def steps_part(model_type: str, layers: int, how: str) -> str:
    """All layers of a model as one operation: a decode graph, compiled steps, or a native stack."""
    return f"{how} for {model_type} of {layers} layers"


def margin_of(part: str, device: Device) -> float:
    in_graphs = device.kind == "cuda" and part.startswith(_GRAPH_PARTS)
    return GRAPH_MARGIN if in_graphs else MARGIN


def _packing(bits: int, mode: str) -> str:
    return f"{bits} bits" if mode == "affine" else mode


class SlowerParts:
    """The parts that are left out on a device. One object is for one load, whose notes it has."""

    def __init__(self, ratios: Mapping[str, float] | None = None, trouble: str | None = None) -> None:
        """`ratios`: by part, how many times MLX's time it takes; `trouble`: why the file says nothing."""
        self._ratios, self._trouble = dict(ratios or {}), trouble
        self._left_out: dict[str, float] = {}

    def leave_out(self, part: str) -> bool:
        """Whether to do without this part, which a model would use and MLX can do as well."""
        if part not in self._ratios:
            return False
        self._left_out[part] = self._ratios[part]
        return True

    @property
    def notes(self) -> list[str]:
        """What was left out so far, for whoever started the server."""
        found = [
            f"{part} by MLX's own operations: measured slower {_BY} ({ratio:.2f} times MLX's time)"
            for part, ratio in self._left_out.items()
        ]
        return found if self._trouble is None else [self._trouble, *found]


NOTHING_SLOWER: Final = SlowerParts()


def slower_parts(device: Device) -> SlowerParts:
    """What is remembered of this device, these versions and nothing else."""
    if os.environ.get(MEASURED_VARIABLE) == "ignore":
        return SlowerParts()
    try:
        entries = _read()
    except (OSError, ValueError) as error:
        file = MEASURED_FILE.expanduser()
        return SlowerParts(trouble=f"{file} is ignored, as it cannot be read: {error}; `ingot doctor --measure` anew")
    key = _key(device)
    return SlowerParts(next((_slower(entry) for entry in entries if _key_of(entry) == key), {}))


def remember(device: Device, ratios: Mapping[str, float]) -> list[str]:
    """Keep by how much parts are slower here than MLX's own, and return those that will be left out. Parts that were
    not measured this time stay as they were. Raises OSError where the file cannot be written."""
    try:
        entries = _read()
    except (OSError, ValueError) as error:
        log.warning("%s is written anew: %s", MEASURED_FILE, error)
        entries = []
    key = _key(device)
    before = next((_slower(entry) for entry in entries if _key_of(entry) == key), {})
    slower = {part: ratio for part, ratio in {**before, **ratios}.items() if ratio > margin_of(part, device)}
    others = [entry for entry in entries if _key_of(entry) != key]
    _write([*others, {**key, "slower": {part: round(ratio, 3) for part, ratio in sorted(slower.items())}}])
    return sorted(slower)


def forget() -> bool:
    """Whether there was something to forget, of any device. Raises OSError."""
    file = MEASURED_FILE.expanduser()
    there = file.exists()
    file.unlink(missing_ok=True)
    return there


def mean_ratio(ratios: Iterable[float]) -> float:
    """Of a part in several cases: the geometric mean, in which twice as fast and twice as slow are even."""
    logarithms = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _key(device: Device) -> dict[str, str]:
    return {"device": f"{device.kind}: {device.name}", "ingot": __version__, "mlx": installed_version("mlx")}


def _key_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("device", "ingot", "mlx")}


def _slower(entry: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = entry["slower"]
    return found


def _read() -> list[dict[str, Any]]:
    """All entries. Raises ValueError for anything that was not written here, and OSError."""
    file = MEASURED_FILE.expanduser()
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    entries = found.get("measured") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError("it does not say what was measured")
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("device", "ingot", "mlx")):
        return False
    slower = entry.get("slower")
    return isinstance(slower, dict) and all(
        isinstance(part, str) and isinstance(ratio, int | float) and math.isfinite(ratio)
        for part, ratio in slower.items()
    )


def _write(entries: list[dict[str, Any]]) -> None:
    file = MEASURED_FILE.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as made:
        json.dump({"measured": entries}, made, indent=2)
        made.write("\n")
    Path(made.name).replace(file)
