"""What each GGUF architecture says about its model: the config mlx-lm wants, and every tensor there must be.

A new architecture is one function here and one line in FAMILIES. A hyper-parameter that its function does not read
is refused by name: it would change what the model computes, and nobody honoured it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import ModelError, nearest
from ingot.models.gguf_file import GGUFFile
from ingot.models.gguf_hyper import Hyper
from ingot.models.gguf_rope import rope_scaling


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the architecture needs: its name in the file, its name in the model, and what it takes."""

    source: str
    target: str
    shape: tuple[int, ...]
    heads: int = 0  # not 0: each head's rows come in interleaved rotary order and are sorted into halves
    minus: float = 0.0  # the file has this much added to every value

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Blueprint:
    config: dict[str, Any]
    tensors: tuple[Wanted, ...]
    spent: frozenset[str]  # tensors whose content went into the config


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The shapes that all these decoders share."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int


def blueprint(file: GGUFFile) -> Blueprint:
    """The model that a file describes. Raises ModelError for one that cannot be run as it is described."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ModelError(_unknown(architecture))
    hyper = Hyper(file, architecture)
    hyper.refuse_unless("expert_count", 0)
    hyper.refuse_unless("expert_used_count", 0)
    hyper.refuse_unless("attention.causal", True)
    plan = FAMILIES[architecture](hyper)
    hyper.refuse_unread()
    return plan


def _unknown(architecture: Any) -> str:
    known = ", ".join(FAMILIES)
    near = nearest(str(architecture), FAMILIES)
    hint = f" (nearest: {near})" if near else ""
    return f"GGUF files of the architecture {architecture!r} are not supported{hint}; supported are: {known}"


def _llama(hyper: Hyper) -> Blueprint:
    sizes = _sizes(hyper)
    _refuse_window(hyper)
    tensors = hyper.file.tensors
    attention_bias, mlp_bias = "blk.0.attn_q.bias" in tensors, "blk.0.ffn_up.bias" in tensors
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=_config(hyper, sizes, "llama", "LlamaForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": attention_bias, "mlp_bias": mlp_bias, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *_ends(hyper, sizes),
            *_projections(
                sizes,
                interleaved=True,
                biased=("q", "k", "v", "o") * attention_bias + ("gate", "up", "down") * mlp_bias,
            ),
            *_norms(sizes, LLAMA_NORMS),
        ),
        spent=spent,
    )


def _qwen2(hyper: Hyper) -> Blueprint:
    sizes = _sizes(hyper)
    _refuse_window(hyper)
    if sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(f"qwen2.attention.key_length is {sizes.head}, which is not embedding_length / head_count")
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=_config(hyper, sizes, "qwen2", "Qwen2ForCausalLM") | {"hidden_act": "silu"} | scaling,
        tensors=(
            *_ends(hyper, sizes),
            *_projections(sizes, biased=("q", "k", "v")),
            *_norms(sizes, LLAMA_NORMS),
        ),
        spent=spent,
    )


def _qwen3(hyper: Hyper) -> Blueprint:
    sizes = _sizes(hyper)
    _refuse_window(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=_config(hyper, sizes, "qwen3", "Qwen3ForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": False, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *_ends(hyper, sizes),
            *_projections(sizes),
            *_norms(sizes, LLAMA_NORMS),
            *_norms(sizes, HEAD_NORMS, width=sizes.head),
        ),
        spent=spent,
    )


def _gemma3(hyper: Hyper) -> Blueprint:
    sizes = _sizes(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    hyper.refuse_unless("final_logit_softcapping", 0.0)
    # The one size whose queries are scaled by the width per head rather than by the head's own width.
    scalar = sizes.hidden // sizes.heads if sizes.layers == 62 else sizes.head
    return Blueprint(
        config=_config(hyper, sizes, "gemma3_text", "Gemma3ForCausalLM")
        | {
            "head_dim": sizes.head,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": hyper.integer("attention.sliding_window"),
            "sliding_window_pattern": _window_pattern(hyper, sizes.layers),
            "rope_theta": hyper.number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": hyper.number("rope.freq_base_swa", 10_000.0),
        }
        | scaling,
        tensors=(
            *_ends(hyper, sizes, norms_plus_one=True),
            *_projections(sizes),
            *_norms(sizes, GEMMA_NORMS, plus_one=True),
            *_norms(sizes, HEAD_NORMS, width=sizes.head, plus_one=True),
        ),
        spent=spent,
    )


FAMILIES: dict[str, Callable[[Hyper], Blueprint]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}

LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _sizes(hyper: Hyper) -> _Sizes:
    hidden, heads = hyper.integer("embedding_length"), hyper.integer("attention.head_count")
    head = hyper.integer("attention.key_length", hidden // heads)
    hyper.refuse_unless("attention.value_length", head)
    hyper.refuse_unless("rope.dimension_count", head)
    embedding = hyper.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file lacks the tensor 'token_embd.weight'")
    hyper.get("vocab_size")  # said again by the embedding's shape, which is what counts
    layers = hyper.integer("block_count")
    if layers > len(hyper.file.tensors):
        raise ModelError(f"{hyper.architecture}.block_count is {layers}, more than the file has tensors")
    return _Sizes(
        hidden=hidden,
        inner=hyper.integer("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=hyper.integer("attention.head_count_kv", heads),
        head=head,
        vocab=embedding.shape[0],
    )


def _config(hyper: Hyper, sizes: _Sizes, model_type: str, class_name: str) -> dict[str, Any]:
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


def _refuse_window(hyper: Hyper) -> None:
    window = hyper.get("attention.sliding_window", 0)
    if window and window < hyper.integer("context_length"):
        raise ModelError(
            f"{hyper.architecture}.attention.sliding_window is {window}: sliding-window attention is not "
            f"supported for {hyper.architecture} models"
        )


def _window_pattern(hyper: Hyper, layers: int) -> int:
    """Every how many layers one attends to everything. Files say it as a number, layer by layer, or not at all."""
    pattern = hyper.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        if len(pattern) != layers or all(pattern):
            raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern does not fit {layers} layers")
        period = pattern.index(False) + 1
        if pattern != [(layer + 1) % period != 0 for layer in range(layers)]:
            raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern is irregular: not supported")
        return period
    period = hyper.integer("attention.sliding_window_pattern", 6)
    if period > layers:
        raise ModelError(
            f"{hyper.architecture}.block_count is {layers}: a model without global layers is not supported"
        )
    return period


def _ends(hyper: Hyper, sizes: _Sizes, *, norms_plus_one: bool = False) -> list[Wanted]:
    matrix = (sizes.vocab, sizes.hidden)
    wanted = [
        Wanted("token_embd.weight", "model.embed_tokens.weight", matrix),
        Wanted("output_norm.weight", "model.norm.weight", (sizes.hidden,), minus=float(norms_plus_one)),
    ]
    if "output.weight" in hyper.file.tensors:
        wanted.append(Wanted("output.weight", "lm_head.weight", matrix))
    return wanted


def _projections(sizes: _Sizes, *, interleaved: bool = False, biased: Sequence[str] = ()) -> list[Wanted]:
    wide, narrow = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    table = {
        "q": ("attn_q", "self_attn.q_proj", (wide, sizes.hidden), sizes.heads * interleaved),
        "k": ("attn_k", "self_attn.k_proj", (narrow, sizes.hidden), sizes.kv_heads * interleaved),
        "v": ("attn_v", "self_attn.v_proj", (narrow, sizes.hidden), 0),
        "o": ("attn_output", "self_attn.o_proj", (sizes.hidden, wide), 0),
        "gate": ("ffn_gate", "mlp.gate_proj", (sizes.inner, sizes.hidden), 0),
        "up": ("ffn_up", "mlp.up_proj", (sizes.inner, sizes.hidden), 0),
        "down": ("ffn_down", "mlp.down_proj", (sizes.hidden, sizes.inner), 0),
    }
    wanted = []
    for layer in range(sizes.layers):
        for key, (source, target, shape, heads) in table.items():
            source, target = f"blk.{layer}.{source}", f"model.layers.{layer}.{target}"
            wanted.append(Wanted(f"{source}.weight", f"{target}.weight", shape, heads))
            if key in biased:
                wanted.append(Wanted(f"{source}.bias", f"{target}.bias", shape[:1], heads))
    return wanted


def _norms(sizes: _Sizes, table: dict[str, str], *, width: int | None = None, plus_one: bool = False) -> list[Wanted]:
    return [
        Wanted(
            f"blk.{layer}.{source}.weight",
            f"model.layers.{layer}.{target}.weight",
            (width or sizes.hidden,),
            minus=float(plus_one),
        )
        for layer in range(sizes.layers)
        for source, target in table.items()
    ]
