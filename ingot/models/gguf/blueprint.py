"""What the decoders in GGUF files share: sizes, tensors of embeddings, attention, MLPs and norms, and rotary scaling.

A `Blueprint` is the config that mlx-lm wants and every tensor that there must be. Rotary scaling that the configs of
mlx-lm and transformers cannot express is refused with ModelError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.models.gguf.file import Hyperparameters, TensorEntry

LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROPE_FREQS = "rope_freqs.weight"
# The only values that models with this kind of scaling were published with, besides their factor.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor that the architecture needs: its name in the file, its name in the model, and its conversion."""

    source: str
    target: str
    shape: tuple[int, ...]  # in the file; three axes are a matrix for each expert or head
    heads: int = 0  # not 0: each head's rows come in interleaved rotary order and are sorted into halves
    minus: float = 0.0  # the file has this much added to every value
    plain: bool = False  # the model has no quantised form of it
    target_shape: tuple[int, ...] = ()  # in the model, where that differs
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()  # tensors that `join` makes one of, with the first
    join: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None

    @property
    def experts(self) -> bool:
        """Whether it is a matrix for each expert."""
        return "_exps." in self.source and len(self.shape) == 3

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]

    def sources(self, there: Collection[str]) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors in a file that holds `there`: older ones have a tensor for each expert."""
        if self.source in there or "_exps." not in self.source:
            return [(self.source, self.shape), *self.further]
        return [(self.source.replace("_exps.", f".{number}."), self.shape[1:]) for number in range(self.shape[0])]


@dataclass(frozen=True, slots=True)
class Blueprint:
    config: dict[str, Any]
    tensors: tuple[WantedTensor, ...]
    spent: frozenset[str]  # tensors that are not written: the config says what they do, or nothing here uses them


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The shapes that all these decoders have."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @classmethod
    def read(cls, hyper: Hyperparameters) -> DecoderSizes:
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
            vocab=vocabulary_size(hyper),
        )


def rotary_decoder_sizes(hyper: Hyperparameters) -> DecoderSizes:
    """Of a decoder whose heads are rotated as a whole. Raises ModelError."""
    sizes = DecoderSizes.read(hyper)
    hyper.refuse_unless("rope.dimension_count", sizes.head)
    return sizes


def layer_count(hyper: Hyperparameters) -> int:
    layers = hyper.integer("block_count")
    if layers > len(hyper.file.tensors):
        raise ModelError(f"{hyper.architecture}.block_count is {layers}, more than the file has tensors")
    return layers


def vocabulary_size(hyper: Hyperparameters) -> int:
    embedding = hyper.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file lacks the tensor 'token_embd.weight'")
    hyper.get("vocab_size")  # the embedding's shape is what counts
    return embedding.shape[0]


def common_config(hyper: Hyperparameters, sizes: DecoderSizes, model_type: str, class_name: str) -> dict[str, Any]:
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


def refuse_sliding_window(hyper: Hyperparameters) -> None:
    window = hyper.get("attention.sliding_window", 0)
    if window and window < hyper.integer("context_length"):
        raise ModelError(
            f"{hyper.architecture}.attention.sliding_window is {window}: sliding-window attention is not "
            f"supported for {hyper.architecture} models"
        )


def end_tensors(
    hyper: Hyperparameters, sizes: DecoderSizes, *, norms_plus_one: bool = False, own_head: bool = False
) -> list[WantedTensor]:
    """The embedding, the last norm and the output head; `own_head`: the model cannot share the embedding's."""
    matrix, tied = (sizes.vocab, sizes.hidden), "output.weight" not in hyper.file.tensors
    wanted = [
        WantedTensor("token_embd.weight", "model.embed_tokens.weight", matrix),
        WantedTensor("output_norm.weight", "model.norm.weight", (sizes.hidden,), minus=float(norms_plus_one)),
    ]
    if own_head or not tied:
        wanted.append(WantedTensor("token_embd.weight" if tied else "output.weight", "lm_head.weight", matrix))
    return wanted


def attention_tensors(
    sizes: DecoderSizes, *, interleaved: bool = False, biased: Sequence[str] = ()
) -> list[WantedTensor]:
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
            wanted.append(WantedTensor(f"{source}.weight", f"{target}.weight", shape, heads))
            if key in biased:
                wanted.append(WantedTensor(f"{source}.bias", f"{target}.bias", shape[:1], heads))
    return wanted


def mlp_tensors(
    layers: Iterable[int],
    hidden: int,
    inner: int,
    *,
    module: str = "mlp",
    suffix: str = "",
    experts: int = 0,
    biased: bool = False,
) -> list[WantedTensor]:
    """gate, up and down of one MLP a layer, or of so many `experts`; their names in the file end in `suffix`."""
    each = (experts,) if experts else ()
    wanted = []
    for layer in layers:
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            source, target = f"blk.{layer}.ffn_{part}{suffix}", f"model.layers.{layer}.{module}.{part}_proj"
            wanted.append(WantedTensor(f"{source}.weight", f"{target}.weight", (*each, *shape)))
            if biased:
                wanted.append(WantedTensor(f"{source}.bias", f"{target}.bias", (*each, shape[0]), plain=True))
    return wanted


def norm_tensors(layers: int, table: Mapping[str, str], width: int, *, plus_one: bool = False) -> list[WantedTensor]:
    return [
        WantedTensor(
            f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{target}.weight", (width,), minus=float(plus_one)
        )
        for layer in range(layers)
        for source, target in table.items()
    ]


def rope_scaling(
    hyper: Hyperparameters, head: int, *, scales_attention: bool = False
) -> tuple[dict[str, Any], frozenset[str]]:
    """The config's part, and the tensors that it was read from. Refuses scaling that configs cannot express.

    `scales_attention`: the model can also scale its attention scores as the scaling requires.
    """
    kind = hyper.get("rope.scaling.type")
    factor = hyper.number("rope.scaling.factor", hyper.number("rope.scale_linear", 1.0))
    freqs = hyper.file.tensors.get(ROPE_FREQS)
    if freqs is not None:
        if kind not in (None, "none"):
            raise ModelError(f"the file has both {hyper.architecture}.rope.scaling.type {kind!r} and {ROPE_FREQS!r}")
        return _llama3_scaling(hyper, freqs, head), frozenset({ROPE_FREQS})
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return {}, frozenset()
    if kind in (None, "linear"):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}, frozenset()
    if kind == "yarn":
        return _yarn_scaling(hyper, factor, scales_attention), frozenset()
    raise ModelError(f"{hyper.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")


def refuse_rope_scaling(hyper: Hyperparameters, head: int) -> frozenset[str]:
    """The tensors that say how positions are scaled, of a model that cannot scale them. Raises ModelError."""
    scaling, spent = rope_scaling(hyper, head)
    if scaling:
        kind = scaling["rope_scaling"]["rope_type"]
        raise ModelError(f"the file scales rotary positions ({kind}), which is not supported for {hyper.architecture}")
    return spent


def _yarn_scaling(hyper: Hyperparameters, factor: float, scales_attention: bool) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor"):
        hyper.refuse_unless(f"rope.scaling.{key}", 1.0)
    hyper.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # -1: the usual one
    growth = hyper.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not scales_attention:
        hyper.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0)
    context = hyper.integer("context_length")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": hyper.integer("rope.scaling.original_context_length", context),
        "beta_fast": hyper.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": hyper.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if growth:  # a tenth of the number in configs, which is the same for positions and for scores
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(growth * 10, 6))
    return {"rope_scaling": scaling}


def _llama3_scaling(hyper: Hyperparameters, entry: TensorEntry, head: int) -> dict[str, Any]:
    """The file has the divisor of each frequency; the published configs have a rule that gives the same."""
    if entry.type != Kind.F32 or entry.shape != (head // 2,):
        raise ModelError(
            f"tensor {ROPE_FREQS!r} is {entry.type.name} of shape {list(entry.shape)}, not F32 [{head // 2}]"
        )
    entry.check_bounds()
    divisors = entry.rows(0, 1).view("<f4")[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return {}
    factor = float(np.max(divisors))
    original = hyper.integer("rope.scaling.original_context_length", LLAMA3_ORIGINAL)
    expected = llama3_divisors(hyper.number("rope.freq_base", 10_000.0), head, factor, original)
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"tensor {ROPE_FREQS!r} holds a frequency scaling that is not supported")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling}


def llama3_divisors(base: float, head: int, factor: float, original: int) -> np.ndarray:
    """Long periods are multiplied by `factor`, short ones are not, those between are interpolated."""
    rotations = original / (2 * np.pi * base ** (np.arange(0, head, 2) / head))
    blend = np.clip((rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)
