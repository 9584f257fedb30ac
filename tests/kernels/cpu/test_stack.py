"""All layers as one operation, against float64 and against the model's own modules."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.kernels.cpu.paging import Rows, empty
from tests.memory import settled

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

HIDDEN, INNER, LAYERS, EPS = 64, 96, 2, 1e-5
BOUND = 2e-4  # of the largest value
HALF_BOUND = 2**-9
"""The same, where keys and values are kept in 16 bits."""
PACKED_BOUND = 4e-2
"""The same, between products of activations in 8 bits and in bfloat16."""


class Reference:
    """The same layers in float64, one sequence at a time."""

    def __init__(self, heads: int, kv_heads: int, size: int, dims: int, neighbours: bool, normed: bool) -> None:
        self.heads, self.kv_heads, self.size, self.dims = heads, kv_heads, size, dims
        self.neighbours, self.normed = neighbours, normed
        self.angles = 100.0 ** (-np.arange(0, dims, 2) / max(dims, 1))
        dice = np.random.default_rng(heads * 100 + size)
        shapes = {
            "q": (heads * size, HIDDEN),
            "k": (kv_heads * size, HIDDEN),
            "v": (kv_heads * size, HIDDEN),
            "o": (HIDDEN, heads * size),
            "gate": (INNER, HIDDEN),
            "up": (INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        draw: Callable[..., np.ndarray] = lambda *shape: dice.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.layers = [
            {name: draw(*shape) / np.float32(shape[1] ** 0.5) for name, shape in shapes.items()}
            | {name: 1 + draw(HIDDEN) / 4 for name in ("attention_norm", "mlp_norm")}
            | {name: 1 + draw(size) / 4 for name in ("q_norm", "k_norm")}
            | {f"{name}_bias": draw(shapes[name][0]) for name in ("q", "k", "v")}
            for _ in range(LAYERS)
        ]

    def stack(self, packed: bool = False) -> native.NativeLayerStack:
        def weights(weight: mx.array, bias: mx.array | None) -> Any:
            if not packed:
                return native.plain_weights(weight, bias)
            return native.packed_weights(*mx.quantize(weight, 32, 4), bias, 32, 4)

        made = native.NativeLayerStack(
            mx.array(self.angles),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.size,
            scale=self.size**-0.5,
            eps=EPS,
            rope_dims=self.dims,
            rope_neighbours=self.neighbours,
            rope_gain=1.0,
        )
        for layer in self.layers:
            arrays = {name: mx.array(value) for name, value in layer.items()}
            made.add(
                norms=(arrays["attention_norm"], arrays["mlp_norm"]),
                matrices=[
                    weights(arrays[name], arrays.get(f"{name}_bias"))
                    for name in ("q", "k", "v", "o", "gate", "up", "down")
                ],
                head_norms=(arrays["q_norm"], arrays["k_norm"]) if self.normed else (None, None),
            )
        return made

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        for layer in self.layers:
            w = {name: value.astype(np.float64) for name, value in layer.items()}
            x = x + self._attended(_normed(x, w["attention_norm"]), w) @ w["o"].T
            h = _normed(x, w["mlp_norm"])
            gate = h @ w["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"].T)) @ w["down"].T
        return x

    def _attended(self, x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
        count = len(x)
        q, k, v = ((x @ w[name].T + w[f"{name}_bias"]).reshape(count, -1, self.size) for name in ("q", "k", "v"))
        if self.normed:
            q, k = _normed(q, w["q_norm"]), _normed(k, w["k_norm"])
        q, k = self._turned(q), self._turned(k)
        out = np.empty_like(q)
        for head in range(self.heads):
            own = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, own].T * self.size**-0.5
            scores[np.triu_indices(count, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, own]
        return out.reshape(count, -1)

    def _turned(self, x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None, None] * self.angles
        half = self.dims // 2
        first = slice(0, self.dims, 2) if self.neighbours else slice(0, half)
        second = slice(1, self.dims, 2) if self.neighbours else slice(half, self.dims)
        out = x.copy()
        out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        out[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return out


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def states(
    kv_heads: int, size: int, pages: int, dtype: mx.Dtype = mx.float32, page: int = 64
) -> tuple[list[mx.array], list[mx.array]]:
    """Keys and values of all layers."""
    keys, values = zip(*(empty(pages, kv_heads, page, size, dtype) for _ in range(LAYERS)), strict=True)
    return list(keys), list(values)


@pytest.mark.usefixtures("one_path")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_prompts_and_steps_gives_what_each_sequence_gives_alone(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    size = data.draw(st.sampled_from([8, 20, 32]))
    dims = data.draw(st.sampled_from([0, size // 2, size]))
    reference = Reference(kv_heads * group, kv_heads, size, dims, data.draw(st.booleans()), data.draw(st.booleans()))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dice = np.random.default_rng(len(lengths))
    texts = [dice.standard_normal((length, HIDDEN)).astype(np.float32) for length in lengths]
    stack = reference.stack()
    tables = Rows(len(texts), 40)
    keys, values = states(kv_heads, size, tables.count)
    done = [0] * len(texts)
    outputs: list[list[np.ndarray]] = [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        pieces, rows, first = [], [], 0
        for slot, (at, text) in enumerate(zip(done, texts, strict=True)):
            count = data.draw(st.integers(0, len(text) - at))
            count = count or (1 if at < len(text) and not rows else 0)
            if count:
                pieces.append((first, count, slot, at))
                rows.append(text[at : at + count])
                first += count
        y, keys, values = stack(mx.array(np.concatenate(rows)), keys, values, tables.spans(pieces))
        for begin, count, slot, at in pieces:
            outputs[slot].append(np.array(y)[begin : begin + count])
            done[slot] = at + count
    for text, output in zip(texts, outputs, strict=True):
        expected = reference(text)
        assert np.abs(np.concatenate(output) - expected).max() <= BOUND * np.abs(expected).max()


@pytest.mark.parametrize("tokens", [49, 100, 301])
def test_many_tokens_at_once_come_out_as_they_do_one_by_one(tokens: int, one_path: None) -> None:
    stack = Reference(6, 2, 32, 32, False, True).stack(packed=True)
    x = mx.random.normal((tokens + 3, HIDDEN), key=mx.random.key(1))
    found = []
    for one in (True, False):
        native.use_one_path(one)
        tables = Rows(2, tokens, page=128)
        keys, values = states(2, 32, tables.count, page=128)
        y, keys, values = stack(x, keys, values, tables.spans([(0, tokens, 1, 0), (tokens, 3, 0, 0)]))
        written = [tables.dense(state, 1, tokens) for state in (*keys, *values)]
        found.append([np.array(y), *written])
    for apart, together in zip(*found, strict=True):
        assert np.abs(apart - together).max() <= PACKED_BOUND * np.abs(apart).max()


def test_states_of_16_bits_change_little() -> None:
    stack = Reference(6, 2, 32, 32, False, True).stack()
    x = mx.random.normal((40, HIDDEN), key=mx.random.key(2))
    found = []
    for dtype in (mx.float32, mx.float16):
        tables = Rows(1, 64)
        keys, values = states(2, 32, tables.count, dtype)
        parts = []
        for begin, end in ((0, 37), (37, 38), (38, 40)):
            y, keys, values = stack(x[begin:end], keys, values, tables.spans([(0, end - begin, 0, begin)]))
            parts.append(np.array(y))
        assert all(state.dtype == dtype for state in (*keys, *values))
        found.append(np.concatenate(parts))
    exact, near = found
    assert 0 < np.abs(exact - near).max() <= HALF_BOUND * np.abs(exact).max()


def test_states_are_written_in_place() -> None:
    stack = Reference(2, 1, 8, 8, False, False).stack()
    keys, values = ([mx.zeros((128, 1, 512, 8)) for _ in range(LAYERS)] for _ in range(2))
    mx.eval(keys, values)
    size = keys[0].nbytes
    before = settled()
    for position in range(3):
        spans = native.attention_spans([(0, 1, 0, position, position)], [(0, array("i", [7]))])
        y, keys, values = stack(mx.ones((1, HIDDEN)), keys, values, spans)
        mx.eval(y, keys, values)
    assert mx.get_peak_memory() - before < size
    written = np.array(keys[0])[:, 0].any(axis=-1)
    assert written[7, :3].all() and written.sum() == 3


@pytest.mark.usefixtures("one_path")
def test_where_pages_lie_and_how_large_they_are_changes_no_bit() -> None:
    stack = Reference(4, 2, 32, 32, False, True).stack(packed=True)
    x = mx.random.normal((1103, HIDDEN), key=mx.random.key(3))
    found = []
    for page, seed in ((64, 0), (64, 1), (128, 2), (256, 3), (512, 4)):
        tables = Rows(2, 800, page, seed=seed)
        keys, values = states(2, 32, tables.count, page=page)
        first, keys, values = stack(x[:-2], keys, values, tables.spans([(0, 700, 1, 0), (700, 401, 0, 0)]))
        steps, keys, values = stack(x[-2:], keys, values, tables.spans([(0, 1, 0, 401), (1, 1, 1, 700)]))
        found.append(np.concatenate([np.array(first), np.array(steps)]))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("one_path")
def test_two_spans_of_one_sequence_give_what_one_gives() -> None:
    stack = Reference(4, 2, 32, 32, False, True).stack()
    x = mx.random.normal((6, HIDDEN), key=mx.random.key(4))
    found = []
    for pieces in ([(0, 6, 0, 0)], [(0, 4, 0, 0), (4, 1, 0, 4), (5, 1, 0, 5)]):
        y, *_ = stack(x, *states(2, 32, 1), Rows(1, 64).spans(pieces))
        found.append(np.array(y))
    assert np.array_equal(*found)


def test_a_launch_of_padding_alone_gives_as_many_tokens() -> None:
    stack = Reference(2, 1, 8, 8, False, False).stack()
    for tokens in (0, 3):
        y, keys, _ = stack(mx.ones((tokens, HIDDEN)), *states(1, 8, 1), native.attention_spans([], []))
        assert y.shape == (tokens, HIDDEN) and np.isnan(np.array(keys[0])).all()


def test_states_that_do_not_fit_are_refused() -> None:
    stack = Reference(2, 1, 8, 8, False, False).stack()
    tables = Rows(1, 64)
    with pytest.raises(ValueError, match="64, 128, 256 or 512"):
        stack(mx.ones((3, HIDDEN)), *states(1, 8, 1, page=96), tables.spans([(0, 3, 0, 0)]))
    with pytest.raises(ValueError, match="does not cover"):
        stack(mx.ones((3, HIDDEN)), *states(1, 8, 1), tables.spans([(0, 3, 0, 62)]))
