"""What the decoders in GGUF files share: their sizes, and the tensors of their ends, attention, MLPs and norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.hyperparameters import Hyperparameters

LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the architecture needs: its name in the file, its name in the model, and what it takes."""

    source: str
    target: str
    shape: tuple[int, ...]  # in the file; three axes are a matrix for each expert or head
    heads: int = 0  # not 0: each head's rows come in interleaved rotary order and are sorted into halves
    minus: float = 0.0  # the file has this much added to every value
    plain: bool = False  # the model has no packed form of it
    held: tuple[int, ...] = ()  # its shape in the model, where that is another
    beside: tuple[tuple[str, tuple[int, ...]], ...] = ()  # tensors that `join` makes one of, with the first
    join: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None

    @property
    def experts(self) -> bool:
        """It is a matrix for each expert."""
        return "_exps." in self.source and len(self.shape) == 3

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]

    def sources(self, there: Collection[str]) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors in a file that holds `there`: older ones have each expert's matrix apart."""
        if self.source in there or "_exps." not in self.source:
            return [(self.source, self.shape), *self.beside]
        return [(self.source.replace("_exps.", f".{number}."), self.shape[1:]) for number in range(self.shape[0])]


@dataclass(frozen=True, slots=True)
class Blueprint:
    config: dict[str, Any]
    tensors: tuple[Wanted, ...]
    spent: frozenset[str]  # tensors that are not written: the config says what they do, or nothing here uses them


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes that all these decoders have."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @classmethod
    def read(cls, hyper: Hyperparameters) -> Sizes:
        """Of attention whose queries, keys and values are equally wide. Raises ModelError."""
        hidden, heads = hyper.integer("embedding_length"), hyper.integer("attention.head_count")
        head = hyper.integer("attention.key_length", hidden // heads)
        hyper.refuse_unless("attention.value_length", head)
        return cls(
            hidden=hidden,
            inner=hyper.integer("feed_forward_length"),
            layers=layer_count(hyper),
            heads=heads,
            kv_heads=hyper.integer("attention.head_count_kv", heads),
            head=head,
            vocab=vocabulary(hyper),
        )


def layer_count(hyper: Hyperparameters) -> int:
    layers = hyper.integer("block_count")
    if layers > len(hyper.file.tensors):
        raise ModelError(f"{hyper.architecture}.block_count is {layers}, more than the file has tensors")
    return layers


def vocabulary(hyper: Hyperparameters) -> int:
    embedding = hyper.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file lacks the tensor 'token_embd.weight'")
    hyper.get("vocab_size")  # said again by the embedding's shape, which is what counts
    return embedding.shape[0]


def usual_config(hyper: Hyperparameters, sizes: Sizes, model_type: str, class_name: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": hyper.integer("context_length"),
        "rms_norm_eps": hyper.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": hyper.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in hyper.file.tensors,
    }


def refuse_window(hyper: Hyperparameters) -> None:
    window = hyper.get("attention.sliding_window", 0)
    if window and window < hyper.integer("context_length"):
        raise ModelError(
            f"{hyper.architecture}.attention.sliding_window is {window}: sliding-window attention is not "
            f"supported for {hyper.architecture} models"
        )


def ends(hyper: Hyperparameters, sizes: Sizes, *, norms_plus_one: bool = False, own_head: bool = False) -> list[Wanted]:
    """The embedding, the last norm and the output head; `own_head`: the model cannot share the embedding's."""
    matrix, tied = (sizes.vocab, sizes.hidden), "output.weight" not in hyper.file.tensors
    wanted = [
        Wanted("token_embd.weight", "model.embed_tokens.weight", matrix),
        Wanted("output_norm.weight", "model.norm.weight", (sizes.hidden,), minus=float(norms_plus_one)),
    ]
    if own_head or not tied:
        wanted.append(Wanted("token_embd.weight" if tied else "output.weight", "lm_head.weight", matrix))
    return wanted


def attention(sizes: Sizes, *, interleaved: bool = False, biased: Sequence[str] = ()) -> list[Wanted]:
    """`biased` are those of q, k, v and o that have biases."""
    wide, narrow = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    table = {
        "q": ("attn_q", "self_attn.q_proj", (wide, sizes.hidden), sizes.heads * interleaved),
        "k": ("attn_k", "self_attn.k_proj", (narrow, sizes.hidden), sizes.kv_heads * interleaved),
        "v": ("attn_v", "self_attn.v_proj", (narrow, sizes.hidden), 0),
        "o": ("attn_output", "self_attn.o_proj", (sizes.hidden, wide), 0),
    }
    wanted = []
    for layer in range(sizes.layers):
        for key, (source, target, shape, heads) in table.items():
            source, target = f"blk.{layer}.{source}", f"model.layers.{layer}.{target}"
            wanted.append(Wanted(f"{source}.weight", f"{target}.weight", shape, heads))
            if key in biased:
                wanted.append(Wanted(f"{source}.bias", f"{target}.bias", shape[:1], heads))
    return wanted


def mlps(
    layers: Iterable[int],
    hidden: int,
    inner: int,
    *,
    module: str = "mlp",
    suffix: str = "",
    experts: int = 0,
    biased: bool = False,
) -> list[Wanted]:
    """gate, up and down of one MLP a layer, or of so many `experts`; their names in the file end in `suffix`."""
    each = (experts,) if experts else ()
    wanted = []
    for layer in layers:
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            source, target = f"blk.{layer}.ffn_{part}{suffix}", f"model.layers.{layer}.{module}.{part}_proj"
            wanted.append(Wanted(f"{source}.weight", f"{target}.weight", (*each, *shape)))
            if biased:
                wanted.append(Wanted(f"{source}.bias", f"{target}.bias", (*each, shape[0]), plain=True))
    return wanted


def norms(layers: int, table: dict[str, str], width: int, *, plus_one: bool = False) -> list[Wanted]:
    return [
        Wanted(f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{target}.weight", (width,), minus=float(plus_one))
        for layer in range(layers)
        for source, target in table.items()
    ]
