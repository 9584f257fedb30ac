"""A multi-token prediction (MTP) head: its module, how it is loaded, and whether it is worth running.

From hidden states and the tokens behind them it computes the hidden states of a draft token. Its layers are mlx-lm's,
swapped like the model's own, with a KV cache of its own: the entry at position p is of the hidden state there and of
token p + 1. The embedding and the lm_head are the model's.

A head that was made from quantised weights, or for another model, loads like any other and predicts nearly nothing,
which would show only in the speed. So `check_draft_head` counts at load how many of the model's own next tokens it
predicts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardBatch, ForwardPart, Row, TokenPositions
from ingot.cache.pages import PAGE
from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import load_tensors
from ingot.models.draft_heads.checkpoint import (
    HeadSource,
    head_blocks,
    path_of_layers,
    quantize_like,
    read_head_tensors,
)
from ingot.models.draft_heads.draft_graph import DraftGraphs, draft_graphs_of
from ingot.models.draft_heads.drafter import Drafter
from ingot.models.families.description import MtpSpec
from ingot.models.forward import attends_natively, new_batch_state
from ingot.models.gguf.weights import hold_blocks, is_block_layer
from ingot.models.layers.decode_graph import GRAPH_TRIALS, decode_graphs_of
from ingot.models.layers.lm_head import tap_hidden_states
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.swapping import swap_modules
from ingot.models.precision import DTYPES, settle_precision
from ingot.models.vision.tower import VisualInputs
from ingot.upstream import caches, create_attention_mask, model_classes

log = logging.getLogger("ingot.models")
HeadKV = Literal["pairs", "states", "model"]
"""What keys and values a draft head attends to: its own, of each token and the hidden state before it, or of each
token's hidden state alone; or the model's."""
LONGEST_HEAD_DRAFT = 8
"""Most draft tokens of a head that was trained for one, by chaining it."""


class DraftHead(Protocol):
    """Runs alongside a model and predicts draft tokens."""

    name: str
    kv: HeadKV
    longest: int  # draft tokens
    size: int  # of the model's hidden states that it takes
    sees: bool  # whether it takes image features where the model does
    graphs: DraftGraphs | None  # what computes all draft tokens of a round at once, on CUDA

    @property
    def weight_bytes(self) -> int: ...
    def make_cache(self) -> list[Any]: ...
    def first_drafts(self, rows: BatchState, row: Row, tokens: list[int], hidden: mx.array) -> mx.array:
        """The draft token [tokens - 1] behind each token but the first, which follows the hidden state before it. The
        row holds all of the tokens, and `hidden` [tokens, size] are their hidden states."""


class ChainedHead(nn.Module):
    """A head that is run over pairs of a hidden state and the token behind that, and goes on from what it gave."""

    kv: HeadKV = "pairs"
    longest = LONGEST_HEAD_DRAFT

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None) -> mx.array:
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        raise NotImplementedError

    def first_drafts(self, rows: BatchState, row: Row, tokens: list[int], hidden: mx.array) -> mx.array:
        """See `DraftHead`."""
        with rows.aside([ForwardBatch((row,), len(tokens) - 1, (0,), (0,))]) as layers:
            states = self(hidden[None, :-1], mx.array([tokens[1:]]), layers[0] if self.kv == "pairs" else layers)
        return mx.argmax(self.logits(states)[0], axis=-1)


class MtpHead(Drafter, ChainedHead):
    name = "mtp"

    def __init__(
        self,
        wiring: MtpSpec,
        alone: Any,
        *,
        size: int,
        eps: float,
        window: int | None = None,
        vocab: int | None = None,
    ) -> None:
        """`alone` is a model of mlx-lm's whose first layers are the head's, which see `window` tokens if they do not
        see all. `vocab`: it has an output head of its own."""
        super().__init__()
        self.wiring, self.size = wiring, size
        kind = type(caches.make_prompt_cache(alone)[0])
        assert kind in (caches.KVCache, caches.RotatingKVCache), "the head's layers need another cache"
        self.window = window if kind is caches.RotatingKVCache else None
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.joint = nn.Linear(2 * size, size, bias=False)
        self.layers = list(alone.layers)[: len(wiring.layers)]
        if wiring.norm is not None:
            self.norm = nn.RMSNorm(size, eps)
        if vocab is not None:
            self.output = nn.Linear(size, vocab, bias=False)

    @property
    def wants(self) -> Literal["normed", "raw"]:
        """Which hidden states of the model it takes."""
        return self.wiring.wants

    def make_cache(self) -> list[Any]:
        """As mlx-lm's models have it. Of a layer that sees a window, all tokens are stored."""
        return [caches.KVCache()]

    def __call__(
        self, hidden: mx.array, tokens: mx.array, cache: Any = None, visual: VisualInputs | None = None
    ) -> mx.array:
        """From hidden states [1, T, size] at some positions and the tokens [1, T] behind those: hidden states
        [1, T, size] whose logits predict the tokens two positions on, and which replace the model's when drafts go on
        from draft tokens. `visual`: image features where the model had them instead of tokens."""
        looked_up = self.embedded(tokens)
        embedded = self._mask_first(looked_up if visual is None else visual.over(looked_up), cache)
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden.astype(embedded.dtype))]
        states: mx.array = self.joint(mx.concatenate(pair[::-1] if self.wiring.hidden_first else pair, axis=-1))
        mask = create_attention_mask(states, cache, window_size=self.window, return_array=self.wiring.array_masks)
        for layer in self.layers:
            states = layer(states, mask, cache)
        return states if self.wiring.norm is None or not self.wiring.normed_chain else self.norm(states)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of what `__call__` returned."""
        if not self.wiring.normed_chain:
            hidden = self.norm(hidden)
        return self.output(hidden) if "output" in self else self.shared_logits(hidden)

    def _mask_first(self, embedded: mx.array, cache: Any) -> mx.array:
        """Embeddings, with zeros at the first position where the head was trained so."""
        if not self.wiring.blind_first:
            return embedded
        offset = 0 if cache is None else cache.offset
        if isinstance(offset, TokenPositions):
            at = offset.at.reshape(-1, *embedded.shape[:2])[0]
        else:
            at = mx.arange(embedded.shape[1]) + mx.array(offset).reshape(-1, 1)
        return mx.where((at == 0)[..., None], 0, embedded)


def load_mtp_head(source: HeadSource, adapter: ModelAdapter, *, dtype: str | None = None) -> MtpHead:
    """The head, in memory and swapped for the adapter's device; the adapter hands over its hidden states from now on.

    Raises ModelError where tensors are missing, of the wrong shape, or cannot be a head's of this model.
    """
    selection = adapter.selection
    if selection is None or not selection.was_used:
        raise ModelError("This model cannot use its head: where it computes logits is not known")
    head, castable = build_mtp_head(source, adapter.config)
    head.share(adapter.model, scaled=False)
    tower = adapter.tower
    prepare_head(head, adapter, dtype, castable, axes=None if tower is None else tower.axes)
    head.sees = tower is not None
    if head.wants == "raw":
        tap_hidden_states(adapter.model, [path_of_layers(adapter.model).removesuffix("layers") + "norm"], selection)
    return head


def prepare_head(
    head: nn.Module,
    adapter: ModelAdapter,
    dtype: str | None,
    castable: Callable[[str], bool],
    axes: Sequence[int] | None = None,
    *,
    apart: bool = False,
) -> None:
    """Bring a head into memory, as the adapter's device computes with it. `axes` and `apart`: see `swap_modules`."""
    if adapter.device.kind != "cpu":
        _cast_head(head, DTYPES[adapter.dtype], castable)
        # Layers of blocks would choose a format of their own.
        dtype = dtype or (adapter.dtype if any(is_block_layer(module) for _, module in head.named_modules()) else None)
    settle_precision(head, adapter.device, dtype)
    mx.eval(head.parameters())
    head.eval()
    # The native kernels that run all layers as one operation share their KV with the model's.
    apart = apart or adapter.device.kind == "cpu"
    swap_modules(head, adapter.device, adapter.kernels, apart=apart, axes=axes)


def with_draft_head(adapter: ModelAdapter, head: DraftHead) -> ModelAdapter:
    """The adapter, with a head: the batch state has room for the head's KV of each token."""
    groups = adapter.footprint.groups
    if head.make_cache():
        token_bytes = _token_bytes(head, adapter)
        if all(window is not None for window, _ in groups):
            groups = (*groups, (None, 0))
        groups = tuple((window, size + (token_bytes if window is None else 0)) for window, size in groups)
    return replace(adapter, head=head, footprint=replace(adapter.footprint, groups=groups))


def _token_bytes(head: Any, adapter: ModelAdapter) -> int:
    """What a head's keys and values of a token take. On the way, its layers become graphs where they can."""
    rows = draft_head_rows(head, adapter)
    part = ForwardPart((rows.new(),), 1)
    for number in range(GRAPH_TRIALS + 1):
        hidden = mx.random.normal((1, 1, head.size), key=mx.random.key(number))
        with rows.launch([part], mixed=adapter.mixed) as layers:
            given = (hidden, layers) if head.kv == "states" else (hidden, mx.array([[number]]), layers[0])
            mx.eval((head.store if head.kv == "states" else head)(*given), rows.pending())
    head.graphs = _checked_graphs(head, rows) if isinstance(head, MtpHead) else None
    if (stack := decode_graphs_of(head)) is not None:
        stack.capture_ahead()
    return rows.groups[0].page_bytes // PAGE


_CHECKED_DEPTHS = 2
_MOST_APART = 0.05
"""By how much the logit of a graph's draft token may be below the largest one of the head's own modules, as a share of
the largest number."""


def _checked_graphs(head: MtpHead, rows: BatchState) -> DraftGraphs | None:
    """What computes a head's draft tokens as one graph, if that gives what its modules do."""
    if head.window is not None or not head.wiring.normed_chain or "output" in head or head.shared is None:
        return None  # which the graph's kernels do not compute
    graphs = draft_graphs_of(head, head.wiring, *head.shared)
    if graphs is None:
        return None
    try:
        wrong = _wrong_draft(head, graphs, rows)
    except (RuntimeError, ValueError) as error:
        wrong = " ".join(str(error).split())[:300]
    if wrong is not None:
        log.warning("draft tokens are not computed as one graph, which is slower: %s", wrong)
        return None
    graphs.capture_ahead()
    return graphs


def _wrong_draft(head: MtpHead, graphs: DraftGraphs, rows: BatchState) -> str | None:
    """How the tokens that a graph drafts differ from those of a head's own modules, behind a hidden state."""
    hidden, row, steps = mx.random.normal((1, head.size), key=mx.random.key(0)), rows.new(), []
    for _ in range(_CHECKED_DEPTHS + 1):
        with rows.launch([ForwardPart((row,), 1)]) as layers:
            steps.append(graphs.step(layers))
    [_, *covered] = steps  # the first position may have no graph
    if any(step is None for step in covered):
        return "no kernel reads its keys and values"
    drafted = graphs.draft(hidden, [1], [0], [step for step in covered if step is not None])
    mx.eval(drafted, rows.pending())
    drafts: list[int] = drafted[0].tolist()  # type: ignore[assignment]
    rows.rewind(row, 1)
    token = 1
    for draft in drafts:
        with rows.launch([ForwardPart((row,), 1)]) as layers:
            hidden = head(hidden[None], mx.array([[token]]), layers[0])[0]
        logits, token = head.logits(hidden)[0].astype(mx.float32), draft
        short = float((logits.max() - logits[token]).item())  # type: ignore[arg-type]
        if short > _MOST_APART * float(mx.abs(logits).max().item()):  # type: ignore[arg-type]
            return f"the logit of a draft token is {short:.2g} less than the largest"
    mx.eval(rows.pending())
    return None


def draft_head_rows(head: DraftHead, adapter: ModelAdapter) -> BatchState:
    """A batch state for a head's own KV, of sequences of the adapter's model."""
    kept = adapter.kept if attends_natively(head) else None
    return new_batch_state(head, 0, kept, adapter.kernels)


def build_mtp_head(source: HeadSource, config: Mapping[str, Any]) -> tuple[MtpHead, Callable[[str], bool]]:
    """The head of a model with this config, only its norms in memory yet, and which of its weights may be cast.

    Raises ModelError where it is not a head of such a model.
    """
    changed = copy.deepcopy(dict(config))
    text = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    size, eps = int(text["hidden_size"]), float(text.get(source.wiring.eps) or 1e-6)
    layers = int(text["num_hidden_layers"])
    for key in source.wiring.by_layer:
        stated = text.get(key)
        text[key] = stated[layers:] or stated[-1:] if isinstance(stated, list) else stated
    text.update(source.wiring.alone)
    if "model_type" in source.wiring.alone:  # the class of a language model, whatever is around it
        changed = text
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # as newer configs have it, and not all of mlx-lm's models
        scaling = None if rope.get("rope_type", "default") == "default" else rope
        text["rope_theta"], text["rope_scaling"] = rope["rope_theta"], text.get("rope_scaling") or scaling
    model_class, args_class = model_classes(config=changed)
    alone = model_class(args_class.from_dict(changed))
    tensors = read_head_tensors(source, alone)
    has_output = any(name.startswith(f"{source.wiring.output}.") for name in source.tensors)
    head = MtpHead(
        source.wiring,
        alone,
        size=size,
        eps=eps,
        window=None if source.wiring.window is None else int(text[source.wiring.window]),
        vocab=int(text["vocab_size"]) if has_output else None,
    )
    hold_blocks(head, head_blocks(source, config))
    quantize_like(head, tensors)
    load_tensors(head, tensors, unneeded=(), whose=f"the head in {source.location}")
    return head, getattr(alone, "cast_predicate", lambda path: True)


def _cast_head(head: nn.Module, dtype: mx.Dtype, wanted: Callable[[str], bool]) -> None:
    """To what the model computes in: where two formats of 16 bits meet, MLX goes on in float32."""
    floats = [(path, array) for path, array in named_parameters(head) if mx.issubdtype(array.dtype, mx.floating)]
    head.update(tree_unflatten([(path, array.astype(dtype)) for path, array in floats if wanted(path)]))


CHECK_TOKENS = 48
"""The model generates so many, greedily, one forward pass each; then the head runs once over all of them."""
CHECK_PROMPT = (5, 17, 3, 29, 11, 23, 7, 19, 2)
VERIFY_COST = 0.05
"""The part of a pass's time that verifying one more token takes at best."""
MOST_REQUIRED = 0.2
"""However much a head costs: the text that it is tested on is one of many."""


def check_draft_head(head: DraftHead, adapter: ModelAdapter, prompt: Sequence[int] = CHECK_PROMPT) -> float:
    """The share of the model's own tokens after `prompt` that the head predicts. Raises ModelError if that could not
    pay on any device."""
    share = head_acceptance(head, adapter, prompt)
    least = break_even_acceptance(head.weight_bytes, adapter.weight_bytes)
    if share < least:
        raise ModelError(
            f"The head predicts {share:.0%} of {CHECK_TOKENS} tokens that its model generates; below {least:.0%} it "
            "only costs time: it does not belong to this model, or was made from quantised weights. `ingot convert "
            "--head-from` takes one from the original checkpoint."
        )
    return share


def break_even_acceptance(head_bytes: int, model_bytes: int) -> float:
    """The acceptance below which a head loses time at best: where a pass takes as long as reading the weights, the
    head's are read for each draft token, which is then verified."""
    return min(VERIFY_COST + head_bytes / model_bytes, MOST_REQUIRED)


def head_acceptance(head: DraftHead, adapter: ModelAdapter, prompt: Sequence[int]) -> float:
    rows = (adapter if adapter.head is head else with_draft_head(adapter, head)).new_batch_state()
    row = rows.new()
    tokens, hidden = _generate_greedily(adapter, rows, row, list(prompt))
    drafts = head.first_drafts(rows, row, tokens, hidden)
    # The first token that the model generated follows the prompt's last.
    right: Any = mx.sum(drafts[len(prompt) - 2 : -1] == mx.array(tokens[len(prompt) :])).item()
    return float(right / CHECK_TOKENS)


def _generate_greedily(
    adapter: ModelAdapter, rows: BatchState, row: Row, tokens: list[int]
) -> tuple[list[int], mx.array]:
    """The prompt and what the model generates behind it, and the hidden states of all of them."""
    new, hidden = list(tokens), []
    for number in range(CHECK_TOKENS + 1):
        logits, states = adapter.run(rows, mx.array(new), [ForwardPart((row,), len(new))], [len(new) - 1], hidden=True)
        hidden.append(states)
        if number < CHECK_TOKENS:
            new = [int(mx.argmax(logits[0]).item())]  # type: ignore[arg-type]
            tokens.extend(new)
        mx.eval(hidden, rows.pending())
    return tokens, mx.concatenate(hidden)
