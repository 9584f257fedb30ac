"""Decoders as embedding models, or as rerankers by the logits of yes and no, such as Qwen3-Embedding and -Reranker.

They run through the same adapter as models that generate, chunk by chunk over KV states of their own. For embeddings
the output head is swapped for one that returns its input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.pages import PAGE
from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.models import checkpoint
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.files.model_config import older_config_names
from ingot.models.gguf.weights import with_gguf_blocks
from ingot.models.layers.lm_head import SELECTIVE_HEADS, LogitsSelection
from ingot.models.layers.modules import adopt_module
from ingot.models.pooling_models.encoder import (
    FloatRows,
    PaddedTexts,
    PoolingEncoder,
    PoolingTraits,
    PoolingWork,
    float_rows_of,
    module_bytes,
)
from ingot.models.pooling_models.sentence_transformers import SentencePooling
from ingot.models.precision import settle_precision
from ingot.upstream import load_config, load_model, model_classes

DECODER_CHUNK = 512
"""The most tokens of a row in one forward pass, after which streams may be served."""


class BareLmHead(nn.Module):
    """Replaces an output head and returns the selected hidden states."""

    def __init__(self, selection: LogitsSelection) -> None:
        super().__init__()
        self._selection = selection

    def __call__(self, x: mx.array) -> mx.array:
        return self._selection.select(x)


class _TiedBareHead:
    """The same for a tied embedding."""

    selection: LogitsSelection

    def as_linear(self, x: mx.array) -> mx.array:
        return self.selection.select(x)


_BARE_EMBEDDINGS = {kind: type(f"Bare{kind.__name__}", (_TiedBareHead, kind), {}) for kind in SELECTIVE_HEADS.values()}


class PoolingDecoder(PoolingEncoder):
    """Rows through a decoder. `_finish` makes the results from the outputs of passes: hidden states or logits."""

    def __init__(self, adapter: ModelAdapter, traits: PoolingTraits) -> None:
        self._adapter, self.traits = adapter, traits

    def run(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> PoolingWork:
        order = list(range(len(tokens)))
        groups = [order] if self._adapter.mixed else [[row] for row in order]
        done: dict[int, Any] = {}
        for group in groups:
            found = yield from self._group([tokens[row] for row in group])
            done |= dict(zip(group, found, strict=True))
        return [done[row] for row in range(len(tokens))]

    def _group(self, texts: list[Sequence[int]]) -> PoolingWork:
        rows = self._adapter.new_batch_state()
        live = [rows.new() for _ in texts]
        chunk = min(DECODER_CHUNK, self._adapter.widest)
        outputs: list[list[mx.array]] = [[] for _ in texts]
        for begin in range(0, max(map(len, texts)), chunk):
            unfinished = [number for number, text in enumerate(texts) if len(text) > begin]
            pieces = [list(texts[number][begin : begin + chunk]) for number in unfinished]
            parts = [ForwardPart((live[number],), len(piece)) for number, piece in zip(unfinished, pieces, strict=True)]
            tokens = mx.array([token for piece in pieces for token in piece])
            for number, output in zip(unfinished, self._run_parts(rows, tokens, parts), strict=True):
                outputs[number].append(output)
            mx.eval([outputs[number][-1] for number in unfinished], rows.pending())
            yield
        return self._finish(outputs, texts)

    @abstractmethod
    def _run_parts(self, rows: BatchState, tokens: mx.array, parts: list[ForwardPart]) -> list[mx.array]:
        """The output of a pass for each part, [tokens or 1, ...]."""

    @abstractmethod
    def _finish(self, outputs: list[list[mx.array]], texts: list[Sequence[int]]) -> FloatRows:
        """The texts' results; `outputs` are those of the passes for each."""

    def batch_bytes(self, tokens: int, width: int) -> int:
        shape = self._adapter.footprint
        states = (tokens + PAGE * max(1, tokens // max(1, width))) * sum(size for _, size in shape.groups)
        # A pass takes a chunk of each row; however many rows there are, that many scores exist at most.
        forward = tokens * (shape.activation + min(DECODER_CHUNK, width) * shape.score)
        return states + forward + shape.recurrent * max(1, tokens // max(1, width)) + self._answer_bytes(tokens)

    def _answer_bytes(self, tokens: int) -> int:
        return 4 * tokens * self.traits.dimension

    @property
    def weight_bytes(self) -> int:
        return self._adapter.weight_bytes + self._adapter.footprint.scratch

    @property
    def dtype(self) -> str:
        return self._adapter.dtype


class EmbeddingDecoder(PoolingDecoder):
    def __init__(self, adapter: ModelAdapter, traits: PoolingTraits, pooling: SentencePooling) -> None:
        super().__init__(_without_head(adapter), traits)
        self._pooling = pooling

    def _run_parts(self, rows: BatchState, tokens: mx.array, parts: list[ForwardPart]) -> list[mx.array]:
        ends = list(accumulate(part.width for part in parts))
        return list(mx.split(self._adapter.run(rows, tokens, parts), ends[:-1]))

    def _finish(self, outputs: list[list[mx.array]], texts: list[Sequence[int]]) -> FloatRows:
        longest = max(map(len, texts))
        whole = mx.stack(
            [
                mx.pad(mx.concatenate(own), [(0, longest - len(text)), (0, 0)])
                for own, text in zip(outputs, texts, strict=True)
            ]
        )
        return float_rows_of(self._pooling(whole, PaddedTexts.of(texts, [()] * len(texts), 0)))

    @property
    def weight_bytes(self) -> int:
        return self._adapter.weight_bytes + module_bytes([self._pooling])


class RerankDecoder(PoolingDecoder):
    """The score of a row is the difference of the logits of "yes" and "no" after it."""

    def __init__(self, adapter: ModelAdapter, traits: PoolingTraits, *, yes: int, no: int) -> None:
        super().__init__(adapter, traits)
        self._yes, self._no = yes, no

    def _run_parts(self, rows: BatchState, tokens: mx.array, parts: list[ForwardPart]) -> list[mx.array]:
        logits = self._adapter.run(rows, tokens, parts, [end - 1 for end in accumulate(part.width for part in parts)])
        scores = logits[:, self._yes].astype(mx.float32) - logits[:, self._no].astype(mx.float32)
        return list(mx.split(scores, len(parts)))

    def _finish(self, outputs: list[list[mx.array]], texts: list[Sequence[int]]) -> FloatRows:
        return float_rows_of(mx.stack([own[-1] for own in outputs]))

    def _answer_bytes(self, tokens: int) -> int:
        return self._adapter.footprint.logits * max(1, tokens // DECODER_CHUNK)


def load_pooling_decoder(folder: Path, device: Device, *, dtype: str | None, headless: bool) -> ModelAdapter:
    """The decoder in `folder`; `headless` where its checkpoint may hold no output head, as embedding models' do not.

    Raises ModelError with what is wrong with it.
    """
    config = load_config(folder)
    _refuse_bidirectional(config)
    changes = older_config_names(config)
    if headless and "lm_head.weight" not in checkpoint.read_checkpoint_tensors(folder):
        changes["tie_word_embeddings"] = True
    try:
        model, config = load_model(folder, model_config=changes, get_model_classes=with_gguf_blocks(_prefixed_classes))
    # The code of a hundred families reads this folder and may fail in any way.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ModelError(f"The model in {folder.name} cannot be loaded: {reason}") from error
    notes = settle_precision(model, device, dtype)
    mx.eval(model.parameters())
    model.eval()
    # A text's KV exists only while it is computed: fewer bits would gain nothing.
    return adapt_model(model, config, device, widest=DECODER_CHUNK, notes=notes, exact=True)


def _refuse_bidirectional(config: dict[str, Any]) -> None:
    text = {**config, **(config.get("text_config") or {})}
    if text.get("is_causal") is False or text.get("use_bidirectional_attention"):
        raise ModelError(
            f"This {config.get('model_type')} model lets tokens see later ones, which is not supported for decoders"
        )
    for architecture in config.get("architectures") or []:
        if str(architecture).endswith("Classification"):
            raise ModelError(f"{architecture}: classification heads of decoders are not supported")


def is_known_to_mlx_lm(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has code for models of this type."""
    try:
        model_classes(config=config)
    except (ValueError, KeyError):
        return False
    return True


def _prefixed_classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes for `config`, with one that also reads checkpoints saved without the head's prefix."""
    model_class, args_class = model_classes(config=config)

    class Prefixed(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return super().sanitize(_with_model_prefix(weights))

    return Prefixed, args_class


def _with_model_prefix(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    if any(name.startswith("model.") for name in weights):
        return weights
    return {name if name.startswith("lm_head.") else f"model.{name}": weight for name, weight in weights.items()}


def _without_head(adapter: ModelAdapter) -> ModelAdapter:
    """The same adapter, whose `run` returns hidden states. Raises ModelError where its output head is not known."""
    if adapter.selection is None or not adapter.selection.was_used:
        raise ModelError(f"The output head of {adapter.family} models is not known, so it gives no hidden states")
    found = [(path, module) for path, module in adapter.model.named_modules() if type(module) in _BARE_EMBEDDINGS]
    [(path, module)] = found
    bare = (
        adopt_module(module, _BARE_EMBEDDINGS[type(module)])
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        else None
    )
    adapter.model.update_modules(tree_unflatten([(path, bare or BareLmHead(adapter.selection))]))
    return adapter
