"""What Kokoro makes of phonemes before there is sound: an ALBERT, a text encoder, and the LSTMs between them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ingot.models.kokoro_config import BertConfig, KokoroConfig
from ingot.models.kokoro_convolutions import Convolution, Work

STEPS = 32
"""Of a recurrence, between two looks at the clock."""


class AlbertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(config.width, config.width) for _ in range(4))
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)
        self._heads = config.heads

    def __call__(self, x: mx.array) -> mx.array:
        queries, keys, values = (
            project(x).reshape(x.shape[0], self._heads, -1).swapaxes(0, 1)[None]
            for project in (self.query, self.key, self.value)
        )
        seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5)
        return self.LayerNorm(x + self.dense(seen[0].swapaxes(0, 1).reshape(x.shape)))


class AlbertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = nn.Linear(config.width, config.inner)
        self.ffn_output = nn.Linear(config.inner, config.width)
        self.full_layer_layer_norm = nn.LayerNorm(config.width, eps=1e-12)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.attention(x)
        return self.full_layer_layer_norm(x + self.ffn_output(nn.gelu_approx(self.ffn(x))))


class AlbertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.embedding)
        self.position_embeddings = nn.Embedding(config.positions, config.embedding)
        self.token_type_embeddings = nn.Embedding(2, config.embedding)
        self.LayerNorm = nn.LayerNorm(config.embedding, eps=1e-12)

    def __call__(self, tokens: mx.array) -> mx.array:
        where = self.position_embeddings.weight[: tokens.shape[0]]
        return self.LayerNorm(self.word_embeddings(tokens) + where + self.token_type_embeddings.weight[0])


class AlbertLayers(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.albert_layers = [AlbertLayer(config)]


class AlbertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embedding_hidden_mapping_in = nn.Linear(config.embedding, config.width)
        self.albert_layer_groups = [AlbertLayers(config)]


class Albert(nn.Module):
    """All its layers have the same weights."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = AlbertEmbeddings(config)
        self.encoder = AlbertEncoder(config)
        self._layers = config.layers

    def run(self, tokens: mx.array) -> Work:
        x = self.encoder.embedding_hidden_mapping_in(self.embeddings(tokens))
        layer = self.encoder.albert_layer_groups[0].albert_layers[0]
        for _ in range(self._layers):
            x = layer(x)
            mx.eval(x)
            yield
        return x


class Lstm(nn.Module):
    """In both directions, under the names of checkpoints. Half of the outputs are of each."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        size = outputs // 2
        for way in ("", "_reverse"):
            self[f"weight_ih_l0{way}"] = mx.zeros((4 * size, inputs))
            self[f"weight_hh_l0{way}"] = mx.zeros((4 * size, size))
            self[f"bias_ih_l0{way}"] = mx.zeros((4 * size,))
            self[f"bias_hh_l0{way}"] = mx.zeros((4 * size,))

    def run(self, x: mx.array) -> Work:
        """[length, inputs] to [length, outputs]."""
        there, back = self._gates(x, ""), self._gates(x[::-1], "_reverse")
        gates = mx.stack([there, back], axis=1)[:, :, None]  # [length, directions, 1, 4 * size]
        recurrent = mx.stack([self["weight_hh_l0"].T, self["weight_hh_l0_reverse"].T])
        mx.eval(gates, recurrent)
        hidden = cell = mx.zeros((2, 1, recurrent.shape[1]))
        done = []
        for step in range(x.shape[0]):
            enters, forgets, candidate, leaves = mx.split(gates[step] + hidden @ recurrent, 4, axis=-1)
            cell = mx.sigmoid(forgets) * cell + mx.sigmoid(enters) * mx.tanh(candidate)
            hidden = mx.sigmoid(leaves) * mx.tanh(cell)
            done.append(hidden)
            if step % STEPS == STEPS - 1:
                mx.eval(hidden, cell)
                yield
        both = mx.stack(done)[:, :, 0]
        found = mx.concatenate([both[:, 0], both[::-1, 1]], axis=-1)
        mx.eval(found)
        yield
        return found

    def _gates(self, x: mx.array, way: str) -> mx.array:
        bias = self[f"bias_ih_l0{way}"] + self[f"bias_hh_l0{way}"]
        return mx.addmm(bias, x, self[f"weight_ih_l0{way}"].T)


class TextEncoder(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.bert.vocab, config.width)
        self.cnn = [
            [Convolution(config.width, config.width, config.kernel), nn.LayerNorm(config.width)]
            for _ in range(config.layers)
        ]
        self.lstm = Lstm(config.width, config.width)

    def run(self, tokens: mx.array) -> Work:
        x = self.embedding(tokens)
        for convolution, norm in self.cnn:
            assert isinstance(convolution, Convolution)
            x = yield from convolution.run(x)
            x = nn.leaky_relu(norm(x), 0.2)
        x = yield from self.lstm.run(x)
        return x
