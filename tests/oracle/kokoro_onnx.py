"""Kokoro-82M as a folder that ingot loads, made from the ONNX file that npm has in shards, and of the voices beside it.

Reads the few fields of ONNX's protocol buffers that weights take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

Field = tuple[int, int | memoryview]

CONFIG = {
    "hidden_dim": 512,
    "style_dim": 128,
    "n_layer": 3,
    "text_encoder_kernel_size": 5,
    "max_dur": 50,
    "n_token": 178,
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
    },
    "istftnet": {
        "upsample_rates": [10, 6],
        "upsample_kernel_sizes": [20, 12],
        "upsample_initial_channel": 512,
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
    },
}
SIGNS = {
    **dict(zip(";:,.!?", range(1, 7), strict=True)),
    **dict(zip('—…"()“” \u0303ʣʥʦʨᵝ\uab67AI', range(9, 26), strict=True)),
    **{"O": 31, "Q": 33, "S": 35, "T": 36, "W": 39, "Y": 41},
    **dict(zip("ᵊabcdef", range(42, 49), strict=True)),
    **dict(zip("hijklmnopqrstuvwxyzɑɐɒæ", range(50, 73), strict=True)),
    **{"β": 75, "ɔ": 76, "ɕ": 77, "ç": 78, "ɖ": 80, "ð": 81, "ʤ": 82, "ə": 83, "ɚ": 85, "ɛ": 86, "ɜ": 87, "ɟ": 90},
    **{"ɡ": 92, "ɥ": 99, "ɨ": 101, "ɪ": 102, "ʝ": 103, "ɯ": 110, "ɰ": 111, "ŋ": 112, "ɳ": 113, "ɲ": 114, "ɴ": 115},
    **{"ø": 116, "ɸ": 118, "θ": 119, "œ": 120, "ɹ": 123, "ɾ": 125, "ɻ": 126, "ʁ": 128, "ɽ": 129, "ʂ": 130, "ʃ": 131},
    **{"ʈ": 132, "ʧ": 133, "ʊ": 135, "ʋ": 136, "ʌ": 138, "ɣ": 139, "ɤ": 140, "χ": 142, "ʎ": 143, "ʒ": 147, "ʔ": 148},
    **{"ˈ": 156, "ˌ": 157, "ː": 158, "ʰ": 162, "ʲ": 164, "↓": 169, "→": 171, "↗": 172, "↘": 173, "ᵻ": 177},
}


@dataclass(frozen=True)
class Node:
    name: str
    kind: str
    inputs: list[str]


@dataclass
class Graph:
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def fields(data: memoryview) -> Iterator[Field]:
    """A message's fields, by number."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
        else:
            size = {1: 8, 5: 4}.get(kind) or number()
            yield key >> 3, data[at : at + size]
            at += size


def texts(data: memoryview, wanted: int) -> list[str]:
    return [bytes(value).decode() for which, value in fields(data) if which == wanted and isinstance(value, memoryview)]


def tensor(data: memoryview) -> tuple[str, np.ndarray | None]:
    """Of floating point numbers; None for others."""
    dims: list[int] = []
    name, kind, raw = "", 0, b""
    for which, value in fields(data):
        if which == 1 and isinstance(value, int):
            dims.append(value)
        elif which == 1 and isinstance(value, memoryview):
            dims += packed(value)
        elif which == 2 and isinstance(value, int):
            kind = value
        elif which in (4, 9) and isinstance(value, memoryview):
            raw = bytes(value)
        elif which == 8 and isinstance(value, memoryview):
            name = bytes(value).decode()
    return name, np.frombuffer(raw, "<f4").reshape(dims) if kind == 1 else None


def packed(data: memoryview) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(value)
            value = shift = 0
    return found


def read_graph(file: bytes) -> Graph:
    graph = Graph()
    (held,) = (value for which, value in fields(memoryview(file)) if which == 7)
    assert isinstance(held, memoryview)
    for which, value in fields(held):
        if which == 1 and isinstance(value, memoryview):
            names, kinds = texts(value, 3), texts(value, 4)
            graph.nodes.append(Node(names[0] if names else "", kinds[0], texts(value, 1)))
        elif which == 5 and isinstance(value, memoryview):
            name, found = tensor(value)
            if found is not None:
                graph.tensors[name] = found
    return graph


def path_of(node: str) -> str:
    """The module that a node stands for: "/encoder/F0.0/conv1x1/Conv" is predictor.F0.0.conv1x1."""
    place = node.split("/")[2:-1]
    if place[0] in ("shared", "F0.0", "F0.1", "F0.2", "N.0", "N.1", "N.2", "lstm", "duration_proj"):
        place.insert(0, "predictor")
    return re.sub(r"_\d+$", "", ".".join(place))


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    """Under the names of PyTorch's checkpoints."""
    found = {}
    for name, held in graph.tensors.items():
        if name.startswith(("encoder.", "decoder.")) and ".stft." not in name:
            found[name.split(".", 1)[1]] = held
    for node in graph.nodes:
        held = [graph.tensors[name] for name in node.inputs if name in graph.tensors]
        if not held:
            continue
        if node.kind in ("Conv", "ConvTranspose") and "/stft/" not in node.name:
            biases = [name for name in node.inputs if name.endswith(".bias")]
            path = biases[0].split(".", 1)[1].removesuffix(".bias") if biases else path_of(node.name)
            found[f"{path}.weight"] = held[0]
        elif node.kind == "MatMul" and node.inputs[1].startswith("onnx::MatMul"):
            found[f"{path_of(node.name)}.weight"] = held[0].T
        elif node.kind == "LSTM":
            found |= lstm_of(path_of(node.name), *held[:3])
    return found


def lstm_of(path: str, inner: np.ndarray, recurrent: np.ndarray, bias: np.ndarray) -> dict[str, np.ndarray]:
    """ONNX has gates in another order: input, output, forget, cell."""
    found = {}
    for at, way in enumerate(("", "_reverse")):
        halves = np.split(bias[at], 2)
        told = {"weight_ih": inner[at], "weight_hh": recurrent[at], "bias_ih": halves[0], "bias_hh": halves[1]}
        for name, held in told.items():
            enters, leaves, forgets, cell = np.split(held, 4)
            found[f"{path}.{name}_l0{way}"] = np.concatenate([enters, forgets, cell, leaves])
    return found


def make_folder(onnx: bytes, voices: Path, folder: Path) -> Path:
    """`voices` holds a file of plain numbers for each voice."""
    (folder / "voices").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab": SIGNS}))
    arrays = {name: mx.array(np.ascontiguousarray(held)) for name, held in weights_of(read_graph(onnx)).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    for file in voices.glob("*.bin"):
        styles = np.frombuffer(file.read_bytes(), "<f4").reshape(-1, 1, 256)
        mx.save_safetensors(str(folder / "voices" / f"{file.stem}.safetensors"), {"voice": mx.array(styles)})
    return folder
