"""From where a head was found to a head that runs beside its model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.batch_state import Rows
from ingot.cache.forward_batch import Part
from ingot.cache.pages import PAGE
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from ingot.models.checkpoint import give
from ingot.models.draft_heads.checkpoint import HeadSource
from ingot.models.gguf.weights import hold_blocks, is_block
from ingot.models.heads.head import Guesser, Head, Shared
from ingot.models.heads.tensors import blocks_in, pack_like, path_of_layers, read_tensors
from ingot.models.layers.lm_head import embedding_of, output_head_of, tap
from ingot.models.layers.modules import parameters
from ingot.models.layers.swapping import swap_modules
from ingot.models.live_states import attends_natively, new_rows
from ingot.models.precision import DTYPES, settle
from ingot.upstream import model_classes


def load_head(source: HeadSource, adapter: Adapter, *, dtype: str | None = None) -> Head:
    """The head, in memory and swapped for the adapter's device; the adapter hands over what it wants from now on.

    Raises ModelError where tensors are missing, of the wrong shape, or cannot be a head's of this model.
    """
    selection, shared = adapter.selection, _shared(adapter.model)
    if selection is None or not selection.obeyed or shared is None:
        raise ModelError("This model cannot use its head: where it computes embeddings or logits is not known")
    head, castable = build_head(source, adapter.config, shared)
    tower = adapter.tower
    prepare(head, adapter, dtype, castable, axes=None if tower is None else tower.axes)
    head.sees = tower is not None
    if head.wants == "raw":
        tap(adapter.model, [path_of_layers(adapter.model).removesuffix("layers") + "norm"], selection)
    return head


def prepare(
    head: nn.Module,
    adapter: Adapter,
    dtype: str | None,
    castable: Callable[[str], bool],
    axes: Sequence[int] | None = None,
) -> None:
    """Bring a head into memory, as the adapter's device computes with it. `axes`: see `positioned`."""
    if adapter.device.kind != "cpu":
        _cast(head, DTYPES[adapter.dtype], castable)
        # Layers of blocks would choose a format of their own.
        dtype = dtype or (adapter.dtype if any(is_block(module) for _, module in head.named_modules()) else None)
    settle(head, adapter.device, dtype)
    mx.eval(head.parameters())
    head.eval()
    swap_modules(head, adapter.device, adapter.kernels, axes=axes)


def with_head(adapter: Adapter, head: Guesser) -> Adapter:
    """The adapter, with a head beside its model: live states have room for what the head keeps of each token."""
    rows = head_rows(head, adapter)
    with rows.launch([Part((rows.new(),), 1)], mixed=adapter.mixed) as layers:
        mx.eval(head(mx.zeros((1, 1, head.size)), mx.array([[0]]), layers[0]))
    taken = rows.groups[0].page_bytes // PAGE
    groups = adapter.footprint.groups
    if all(window is not None for window, _ in groups):
        groups = (*groups, (None, 0))
    groups = tuple((window, size + (taken if window is None else 0)) for window, size in groups)
    return replace(adapter, head=head, footprint=replace(adapter.footprint, groups=groups))


def head_rows(head: Guesser, adapter: Adapter) -> Rows:
    """Live states for a head's own keys and values, of sequences of the adapter's model."""
    kept = adapter.kept if attends_natively(head) else None
    return new_rows(head, 0, kept, adapter.kernels)


def build_head(
    source: HeadSource, config: Mapping[str, Any], shared: Shared | None = None
) -> tuple[Head, Callable[[str], bool]]:
    """The head of a model with this config, none of it in memory yet but norms, and which of its weights may be cast.

    Raises ModelError where it is not a head of such a model.
    """
    changed = copy.deepcopy(dict(config))
    text = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    size, eps = int(text["hidden_size"]), float(text.get(source.wiring.eps) or 1e-6)
    text.update(source.wiring.alone)
    model_class, args_class = model_classes(config=changed)
    alone = model_class(args_class.from_dict(changed))
    tensors = read_tensors(source, alone)
    head = Head(source.wiring, alone, shared, size=size, eps=eps)
    hold_blocks(head, blocks_in(source, config))
    pack_like(head, tensors)
    give(head, tensors, unneeded=(), whose=f"the head in {source.said}")
    return head, getattr(alone, "cast_predicate", lambda path: True)


def _cast(head: nn.Module, dtype: mx.Dtype, wanted: Callable[[str], bool]) -> None:
    """To what the model computes in: where two formats of 16 bits meet, MLX goes on in float32."""
    floats = [(path, array) for path, array in parameters(head) if mx.issubdtype(array.dtype, mx.floating)]
    head.update(tree_unflatten([(path, array.astype(dtype)) for path, array in floats if wanted(path)]))


def _shared(model: Any) -> Shared | None:
    embedding, output = embedding_of(model), output_head_of(model)
    return None if embedding is None or output is None else Shared(embedding, output)
