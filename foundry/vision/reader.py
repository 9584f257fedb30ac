"""The shipped vision model computed with mlx alone: Qwen3-VL's tower and text model, small enough to read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundry.vision.prompts import MERGE, PATCH, TEMPORAL, Read
from foundry.vision.scenes import Sight
from ingot.kernels.cpu import fastblas

# mlx binds its BLAS when it is imported.
fastblas.install()

import mlx.core as mx  # noqa: E402

TOWER, TEXT = "model.visual", "model.language_model"


@dataclass(frozen=True)
class Seen:
    """What stands for pictures, (tokens, width), and what is added to it after the first layers."""

    shown: mx.array
    deeper: list[mx.array]


class Reader:
    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._text, self._vision = config["text_config"], config["vision_config"]
        loaded: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))
        self._weights = {name: tensor.astype(mx.float32) for name, tensor in loaded.items()}

    def answers(self, seen: Seen, asked: Read) -> bool:
        """Whether greedy decoding writes the right answer: whether each of its tokens is the likeliest there."""
        guessed = np.array(mx.argmax(self.logits(seen, asked), axis=-1))
        return guessed[len(asked.prompt) - 1 : -1].tolist() == asked.answer

    def logits(self, seen: Seen, asked: Read) -> mx.array:
        """After each token of the prompt and the answer."""
        words = self._weights[f"{TEXT}.embed_tokens.weight"]
        states = words[mx.array(asked.prompt + asked.answer)]
        places = mx.array(asked.seen)
        states[places] = seen.shown
        angles = self._angles(asked.positions)
        for number in range(self._text["num_hidden_layers"]):
            states = self._layer(f"{TEXT}.layers.{number}", states, angles)
            if number < len(seen.deeper):
                states[places] = states[places] + seen.deeper[number]
        return self._rms(f"{TEXT}.norm", states) @ words.T

    def see(self, sight: Sight) -> Seen:
        frames = sight.frames if sight.clip else np.repeat(sight.frames, TEMPORAL, axis=0)
        patches, rows, columns = cut(frames)
        kernel = self._weights[f"{TOWER}.patch_embed.proj.weight"]
        states = mx.array(patches) @ kernel.reshape(len(kernel), -1).T + self._weights[f"{TOWER}.patch_embed.proj.bias"]
        states = states + self._learned_places(rows, columns)
        angles = self._plane(rows, columns)
        deeper = []
        for number in range(self._vision["depth"]):
            states = self._block(f"{TOWER}.blocks.{number}", states, angles)
            if number in self._vision["deepstack_visual_indexes"]:
                deeper.append(self._merged(f"{TOWER}.deepstack_merger_list.{len(deeper)}", states, late_norm=True))
        seen = Seen(self._merged(f"{TOWER}.merger", states, late_norm=False), deeper)
        mx.eval(seen.shown, seen.deeper)
        return seen

    def _learned_places(self, rows: int, columns: int) -> mx.array:
        """The square table of places, stretched over the picture."""
        table = self._weights[f"{TOWER}.pos_embed.weight"]
        side = round(len(table) ** 0.5)
        down, across = merged_order(rows, columns)
        found = mx.zeros((rows * columns, table.shape[1]))
        for row, row_share in _neighbours(down, rows, side):
            for column, column_share in _neighbours(across, columns, side):
                found = found + table[mx.array(row * side + column)] * mx.array(row_share * column_share)[:, None]
        return found

    def _plane(self, rows: int, columns: int) -> tuple[mx.array, mx.array]:
        """Angles of rows and columns, side by side."""
        size = self._vision["hidden_size"] // self._vision["num_heads"] // 2
        rates = 10000.0 ** (-np.arange(0, size, 2) / size)
        both = np.concatenate([place[:, None] * rates for place in merged_order(rows, columns)], axis=-1)
        return _cosines(both)

    def _block(self, name: str, states: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
        pictures, count, width = states.shape
        joint = self._linear(f"{name}.attn.qkv", self._layer_norm(f"{name}.norm1", states))
        joint = joint.reshape(pictures, count, 3, self._vision["num_heads"], -1).transpose(2, 0, 3, 1, 4)
        queries, keys = turned(joint[0], angles), turned(joint[1], angles)
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, joint[2], scale=queries.shape[-1] ** -0.5)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(pictures, count, width)
        states = states + self._linear(f"{name}.attn.proj", mixed)
        inner = self._linear(f"{name}.mlp.linear_fc1", self._layer_norm(f"{name}.norm2", states))
        inner = inner * (1 + mx.tanh((2 / np.pi) ** 0.5 * (inner + 0.044715 * inner**3))) / 2
        return states + self._linear(f"{name}.mlp.linear_fc2", inner)

    def _merged(self, name: str, states: mx.array, *, late_norm: bool) -> mx.array:
        """Four neighbouring patches into one token."""
        wide = MERGE * MERGE * states.shape[-1]
        if late_norm:
            states = self._layer_norm(f"{name}.norm", states.reshape(-1, wide))
        else:
            states = self._layer_norm(f"{name}.norm", states).reshape(-1, wide)
        inner = self._linear(f"{name}.linear_fc1", states)
        return self._linear(f"{name}.linear_fc2", inner * (1 + mx.erf(inner / 2**0.5)) / 2)

    def _angles(self, positions: np.ndarray) -> tuple[mx.array, mx.array]:
        """Of time, row and column in turns; what is left over is of time."""
        size = self._text["head_dim"]
        rates = self._text["rope_theta"] ** (-np.arange(0, size, 2) / size)
        axes = np.zeros(len(rates), dtype=int)
        for axis in (1, 2):
            axes[axis : 3 * self._text["rope_scaling"]["mrope_section"][axis] : 3] = axis
        return _cosines(positions[axes].T * rates)

    def _layer(self, name: str, states: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
        normed = self._rms(f"{name}.input_layernorm", states)
        queries, keys, values = (
            (normed @ self._weights[f"{name}.self_attn.{part}_proj.weight"].T)
            .reshape(1, len(states), -1, self._text["head_dim"])
            .transpose(0, 2, 1, 3)
            for part in "qkv"
        )
        queries = turned(self._rms(f"{name}.self_attn.q_norm", queries), angles)
        keys = turned(self._rms(f"{name}.self_attn.k_norm", keys), angles)
        scale = self._text["head_dim"] ** -0.5
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")
        mixed = mixed[0].transpose(1, 0, 2).reshape(len(states), -1)
        states = states + mixed @ self._weights[f"{name}.self_attn.o_proj.weight"].T
        normed = self._rms(f"{name}.post_attention_layernorm", states)
        gate, up = (normed @ self._weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return states + (gate * mx.sigmoid(gate) * up) @ self._weights[f"{name}.mlp.down_proj.weight"].T

    def _linear(self, name: str, states: mx.array) -> mx.array:
        return states @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _layer_norm(self, name: str, states: mx.array) -> mx.array:
        return mx.fast.layer_norm(states, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], 1e-6)

    def _rms(self, name: str, states: mx.array) -> mx.array:
        return mx.fast.rms_norm(states, self._weights[f"{name}.weight"], self._text["rms_norm_eps"])


def cut(frames: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Pixels from -1 to 1 by pairs of frames and patches, (pairs, patches, values); rows and columns of patches."""
    count, height, width = frames.shape[:3]
    rows, columns = height // PATCH, width // PATCH
    split = frames.reshape(
        count // TEMPORAL, TEMPORAL, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return split.reshape(count // TEMPORAL, rows * columns, -1).astype(np.float32) / 127.5 - 1, rows, columns


def merged_order(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch, in the order in which patches are merged."""
    down, across = np.indices((rows, columns))
    return tuple(
        place.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(0, 2, 1, 3).ravel()
        for place in (down, across)
    )


def _neighbours(places: np.ndarray, count: int, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The two entries of a table of `side` between which each of `count` places lies, and their shares."""
    where = places * (side - 1) / max(1, count - 1)
    before = np.floor(where).astype(int)
    share = (where - before).astype(np.float32)
    return [(before, 1 - share), (np.minimum(before + 1, side - 1), share)]


def _cosines(angles: np.ndarray) -> tuple[mx.array, mx.array]:
    doubled = np.concatenate([angles, angles], axis=-1).astype(np.float32)
    return mx.array(np.cos(doubled)), mx.array(np.sin(doubled))


def turned(states: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
    cosine, sine = angles
    first, second = mx.split(states, 2, axis=-1)
    return states * cosine + mx.concatenate([-second, first], axis=-1) * sine
