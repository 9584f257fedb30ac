"""GGUF files with random weights, which llama.cpp and ingot can both load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.config import DEFAULT_MODEL
from ingot.models.files.packaged import original
from ingot.models.files.progress import Progress

BLOCK = 32  # weights of a Q4_1 block: a scale and a minimum of 16 bits each, then 4 bits a weight


@dataclass(frozen=True, slots=True)
class Shape:
    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", layers=28, hidden=1024, inner=3072, heads=16, kv_heads=8, head_size=128),
    "smollm2-135m": Shape("llama", layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_size=64),
}


def write(name: str, folder: Path, progress: Progress, tokenizer: Path | None = None) -> Path:
    """A model of that shape, packed as Q4_1, with the tokenizer of a GGUF file (the default model's)."""
    import gguf

    shape, path = SHAPES[name], folder / f"{name}.gguf"
    source = gguf.GGUFReader(str(tokenizer or original(DEFAULT_MODEL, folder / "tokenizer", progress)))
    progress(f"writing a random {name}")
    writer = gguf.GGUFWriter(str(path), shape.kind)
    vocab = _copy_tokenizer(source, writer)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(1e6)
    dice = np.random.default_rng(0)
    _add(writer, "token_embd.weight", (vocab, shape.hidden), dice)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        for matrix, size in shape.matrices().items():
            _add(writer, f"blk.{layer}.{matrix}.weight", size, dice)
        for norm, size in (("attn_norm", shape.hidden), ("ffn_norm", shape.hidden)):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
        for norm in ("attn_q_norm", "attn_k_norm") if shape.kind == "qwen3" else ():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(shape.head_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, size: tuple[int, int], dice: np.random.Generator) -> None:
    """Random blocks whose values lie around zero, as wide as keeps activations where they are."""
    import gguf

    rows, columns = size
    blocks = dice.integers(0, 256, (rows, columns // BLOCK, 20), dtype=np.uint8)
    scale = np.float16(1 / (4.6 * columns**0.5))
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    blocks[..., 2:4] = np.frombuffer(np.float16(-7.5 * scale).tobytes(), np.uint8)
    packed = blocks.reshape(rows, -1)
    writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)


def _copy_tokenizer(reader: Any, writer: Any) -> int:
    """The tokenizer's entries; how many tokens there are."""
    import gguf

    for name, field in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, inside = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(
            name, field.contents(), kind, sub_type=inside if kind == gguf.GGUFValueType.ARRAY else None
        )
    return len(reader.fields["tokenizer.ggml.tokens"].data)
