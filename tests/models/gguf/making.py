"""Small GGUF files made for tests: random blocks of every format, tiny models of every architecture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from tokenizers.pre_tokenizers import ByteLevel

# Where each format keeps its float16 numbers. They must be sane; every other byte may be anything.
HALF_PLACES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
    Kind.IQ1_S: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ1_M: (),
    Kind.MXFP4: (),
}
# The largest code times the largest scale of the format, so that weights come out near one in size.
REACH = {
    Kind.Q4_0: 8, Kind.Q4_1: 15, Kind.Q5_0: 16, Kind.Q5_1: 31, Kind.Q8_0: 128,
    Kind.Q2_K: 45, Kind.Q3_K: 128, Kind.Q4_K: 945, Kind.Q5_K: 1953, Kind.Q6_K: 4064,
    Kind.TQ1_0: 1, Kind.TQ2_0: 2, Kind.IQ1_S: 17, Kind.IQ2_XXS: 167, Kind.IQ2_XS: 167, Kind.IQ2_S: 167,
    Kind.IQ3_XXS: 480, Kind.IQ3_S: 465, Kind.IQ4_NL: 127, Kind.IQ4_XS: 4064, Kind.IQ1_M: 17,
}  # fmt: skip


def random_rows(rng: np.random.Generator, kind: Kind, rows: int, columns: int, size: float = 1.0) -> np.ndarray:
    """Raw bytes of a random matrix, whose weights are of about `size`; each line of bytes is a row."""
    if kind == Kind.F32:
        return (rng.standard_normal((rows, columns)) * size).astype(np.float32).view(np.uint8)
    if kind == Kind.F16:
        return (rng.standard_normal((rows, columns)) * size).astype(np.float16).view(np.uint8)
    if kind == Kind.BF16:
        wide = (rng.standard_normal((rows, columns)) * size).astype(np.float32)
        return np.ascontiguousarray((wide.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    block, width = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block, width), dtype=np.uint8)
    for offset in HALF_PLACES[kind]:
        halves = (rng.uniform(-1, 1, (len(blocks), 1)) * size / REACH[kind]).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(120, 124, len(blocks))  # the exponent, of a power of two below one
    if kind == Kind.IQ1_M:
        _place_in_quarters(blocks, (rng.uniform(-1, 1, len(blocks)) * size / REACH[kind]).astype(np.float16))
    return blocks.reshape(rows, -1)


def _place_in_quarters(blocks: np.ndarray, halves: np.ndarray) -> None:
    """IQ1_M keeps its one float16 number in the top four bits of each of its last four words."""
    words = np.ascontiguousarray(blocks[:, -8:]).view("<u2")
    quarters = halves.view("<u2")[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
    blocks[:, -8:] = (words & 0x0FFF | quarters << 12).view(np.uint8)


def byte_level_vocabulary(extra: tuple[str, ...] = ()) -> dict[str, object]:
    """A gpt2-type vocabulary: the 256 bytes, a few merges, control tokens at the end."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "o r", "Ġ Ġ", "1 2", "Ċ Ċ"]
    merged = [merge.replace(" ", "") for merge in merges]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra]
    tokens = alphabet + merged + control
    first = len(alphabet) + len(merged)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3] * len(control),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first + 1,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def sentencepiece_vocabulary() -> dict[str, object]:
    """A llama-type vocabulary: pieces with scores, the 256 bytes, two user-defined tokens."""
    pieces = ["▁", *"abcdehlorw", "he", "ll", "hell", "hello", "▁w", "or", "▁wor", "▁hello", "▁worl", "▁world"]
    head, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    user = ["<tag>", "\n\n"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + bytes_ + pieces + user,
        "tokenizer.ggml.scores": [0.0] * (3 + 256) + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * 2,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4] * 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@dataclass
class TinyModel:
    """A GGUF file in the making; change it before `write`."""

    metadata: dict[str, object]
    tensors: dict[str, tuple[Kind, tuple[int, ...], np.ndarray]]

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, str(self.metadata["general.architecture"]))
        for key, value in self.metadata.items():
            if key != "general.architecture":
                _add(writer, key, value)
        for name, (kind, shape, raw) in self.tensors.items():
            if kind in (Kind.F32, Kind.F16):
                writer.add_tensor(name, raw.view(np.float32 if kind == Kind.F32 else np.float16).reshape(shape))
            else:
                writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def dense(self, name: str) -> np.ndarray:
        kind, shape, raw = self.tensors[name]
        return dequantize(raw.view(np.float32) if kind == Kind.F32 else raw, kind).reshape(shape).astype(np.float32)


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


HIDDEN, INNER, HEADS, KV_HEADS, HEAD, CONTEXT = 256, 512, 4, 2, 64, 128
LAYERS = {"gemma3": 7}  # the sixth attends to everything; of the others, two are enough


def tiny_model(
    architecture: str,
    *,
    kinds: Sequence[Kind] = (Kind.F32,),
    vocabulary: dict[str, object] | None = None,
    tied: bool = True,
    seed: int = 0,
    layers: int | None = None,
) -> TinyModel:
    """A random model of a few layers; its matrices take the `kinds` in turn."""
    layers = layers or LAYERS.get(architecture, 2)
    vocabulary = vocabulary if vocabulary is not None else byte_level_vocabulary()
    words = len(vocabulary["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.key_length": HEAD,
        f"{architecture}.attention.value_length": HEAD,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        **vocabulary,
    }
    if architecture == "gemma3":
        metadata["gemma3.attention.sliding_window"] = 8
        metadata["gemma3.rope.freq_base"] = 1000000.0
    model = TinyModel(metadata, {})
    rng, turn = np.random.default_rng(seed), itertools.cycle(kinds)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = next(turn)
        model.tensors[f"{name}.weight"] = (kind, (rows, columns), random_rows(rng, kind, rows, columns, 0.06))

    def vector(name: str, width: int, around: float = 1.0) -> None:
        values = (around + 0.1 * rng.standard_normal(width)).astype(np.float32)
        model.tensors[name] = (Kind.F32, (width,), values)

    matrix("token_embd", words, HIDDEN)
    vector("output_norm.weight", HIDDEN)
    if not tied:
        matrix("output", words, HIDDEN)
    for layer in range(layers):
        block = f"blk.{layer}"
        matrix(f"{block}.attn_q", HEADS * HEAD, HIDDEN)
        matrix(f"{block}.attn_k", KV_HEADS * HEAD, HIDDEN)
        matrix(f"{block}.attn_v", KV_HEADS * HEAD, HIDDEN)
        matrix(f"{block}.attn_output", HIDDEN, HEADS * HEAD)
        matrix(f"{block}.ffn_gate", INNER, HIDDEN)
        matrix(f"{block}.ffn_up", INNER, HIDDEN)
        matrix(f"{block}.ffn_down", HIDDEN, INNER)
        norms = ["attn_norm", "ffn_norm"]
        norms += ["post_attention_norm", "post_ffw_norm"] if architecture == "gemma3" else []
        for norm in norms:
            vector(f"{block}.{norm}.weight", HIDDEN)
        if architecture in ("qwen3", "gemma3"):
            vector(f"{block}.attn_q_norm.weight", HEAD)
            vector(f"{block}.attn_k_norm.weight", HEAD)
        if architecture == "qwen2":
            for part, width in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
                vector(f"{block}.attn_{part}.bias", width, around=0.0)
    return model


def as_q4_k_m(model: TinyModel, seed: int = 1) -> TinyModel:
    """The same model with random weights of the formats that llama.cpp mixes in files that it calls Q4_K_M."""
    rng = np.random.default_rng(seed)
    head = "output.weight" if "output.weight" in model.tensors else "token_embd.weight"
    for name, (_, shape, _) in model.tensors.items():
        if len(shape) == 2:
            fine = name == head or ".attn_v." in name or ".ffn_down." in name
            kind = Kind.Q6_K if fine else Kind.Q4_K
            model.tensors[name] = (kind, shape, random_rows(rng, kind, *shape, 0.06))
    return model
