"""GGUF files with random weights, which llama.cpp and ingot can both load, and the memory that serving them takes.

python -m bench.gguf_models --shape gemma-3-270m qwen2.5-coder-0.5b     memory at ready, as a ratio to the file
python -m bench.gguf_models --file model.gguf                           of an existing file
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from bench import servers
from ingot.config import DEFAULT_MODEL
from ingot.errors import IngotError
from ingot.models.files.packaged import fetch_original_weights
from ingot.models.files.progress import Progress, TerminalProgress

SPACE_MARK = "\u2581"
LONGEST = 10  # letters of an invented token
SPREAD = 1 / 4.6  # of random weights, by which activations stay as large as they are


@dataclass(frozen=True, slots=True)
class Shape:
    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int = 0  # 0: that of the tokenizer which it is given
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # of matrices that are not Q4_1

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

    def norms(self) -> dict[str, int]:
        """A layer's, and how wide they are."""
        wide = {
            "gemma3": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
        }.get(self.kind, ("attn_norm", "ffn_norm"))
        of_heads = ("attn_q_norm", "attn_k_norm") if self.kind in ("qwen3", "gemma3") else ()
        return dict.fromkeys(wide, self.hidden) | dict.fromkeys(of_heads, self.head_size)

    def biases(self) -> dict[str, int]:
        biased = ("attn_q", "attn_k", "attn_v") if self.kind == "qwen2" else ()
        return {matrix: self.matrices()[matrix][0] for matrix in biased}


_Q4_K_M = MappingProxyType(
    {
        "token_embd": Kind.Q8_0,
        "attn_q": Kind.Q5_0,
        "attn_k": Kind.Q5_0,
        "attn_v": Kind.Q8_0,
        "ffn_gate": Kind.Q5_0,
        "ffn_up": Kind.Q5_0,
        "ffn_down": Kind.Q6_K,
    }
)
"""What llama.cpp makes of Q4_K_M where rows do not divide into blocks of 256: other formats take the place of K's."""

SHAPES = {
    "qwen3-0.6b": Shape("qwen3", layers=28, hidden=1024, inner=3072, heads=16, kv_heads=8, head_size=128),
    "smollm2-135m": Shape("llama", layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_size=64),
    "gemma-3-270m": Shape(
        *("gemma3", 18, 640, 2048, 4, 1, 256), vocab=262144, kinds={**_Q4_K_M, "attn_output": Kind.Q4_K}
    ),
    "qwen2.5-coder-0.5b": Shape(
        *("qwen2", 24, 896, 4864, 14, 2, 64), vocab=151936, kinds={**_Q4_K_M, "attn_output": Kind.Q5_0}
    ),
}


def write(name: str, folder: Path, progress: Progress, tokenizer: Path | None = None) -> Path:
    """A model of that shape, packed as Q4_1 or as such files are published, with the tokenizer of a GGUF file (the
    default model's), or one of as many words as the shape has."""
    import gguf

    shape, path = SHAPES[name], folder / f"{name}.gguf"
    progress(f"writing a random {name}")
    writer = gguf.GGUFWriter(str(path), shape.kind)
    if shape.vocab:
        vocab = shape.vocab
        _invent_tokenizer(writer, shape)
    else:
        source = gguf.GGUFReader(
            str(tokenizer or fetch_original_weights(DEFAULT_MODEL, folder / "tokenizer", progress))
        )
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
    if shape.kind == "gemma3":
        writer.add_sliding_window(512)
    dice = np.random.default_rng(0)
    _add(writer, shape, "token_embd", "token_embd.weight", (vocab, shape.hidden), dice)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        for matrix, size in shape.matrices().items():
            _add(writer, shape, matrix, f"blk.{layer}.{matrix}.weight", size, dice)
        for norm, width in shape.norms().items():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(width, np.float32))
        for matrix, width in shape.biases().items():
            writer.add_tensor(f"blk.{layer}.{matrix}.bias", np.zeros(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, shape: Shape, matrix: str, name: str, size: tuple[int, int], dice: np.random.Generator) -> None:
    kind = shape.kinds.get(matrix, Kind.Q4_1)
    writer.add_tensor(name, random_blocks(kind, *size, dice), raw_dtype=kind)


def random_blocks(kind: Kind, rows: int, columns: int, dice: np.random.Generator) -> np.ndarray:
    """Blocks whose values lie around zero, as wide as keeps activations where they are: uint8 [rows, bytes]."""
    weights, size = GGML_QUANT_SIZES[kind]
    blocks = dice.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    for place, share in _HALVES[kind].items():
        half = np.float16(share * SPREAD / columns**0.5)
        blocks[..., place : place + 2] = np.frombuffer(half.tobytes(), np.uint8)
    if kind == Kind.Q6_K:
        blocks[..., 192:208] = 16  # scales, in units
    return blocks.reshape(rows, -1)


# Where a block has float16 numbers, and how large they are where its values are about as large as 1.
_HALVES: dict[Kind, dict[int, float]] = {
    Kind.Q4_1: {0: 1.0, 2: -7.5},
    Kind.Q5_0: {0: 0.5},
    Kind.Q8_0: {0: 1 / 16},
    Kind.Q4_K: {0: 1 / 64, 2: 1 / 8},
    Kind.Q6_K: {208: 1 / 256},
}


def _invent_tokenizer(writer: Any, shape: Shape) -> None:
    """As many tokens as the shape has, each but the letters made of two that come before it, as real ones are."""
    byte_level = shape.kind == "qwen2"
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = _byte_letters() if byte_level else [SPACE_MARK, *ascii_letters, *(chr(0x4E00 + n) for n in range(20))]
    dice, words, known, merges = np.random.default_rng(1), list(letters), set(letters), list[str]()
    while len(words) + len(special) < shape.vocab:
        for left, right in (dice.random((1 << 14, 2)) ** 4 * len(words)).astype(int).tolist():
            joined = words[left] + words[right]
            if joined not in known and len(joined) <= LONGEST and len(words) + len(special) < shape.vocab:
                known.add(joined)
                merges.append(f"{words[left]} {words[right]}")
                words.append(joined)
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_token_list([*special, *words])
    writer.add_token_types([3, 3, 3, 2 if not byte_level else 3, 3, 3] + [1] * len(words))
    if byte_level:
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([-float(place) for place in range(shape.vocab)])
        writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _copy_tokenizer(reader: Any, writer: Any) -> int:
    """The tokenizer's entries; how many tokens there are."""
    import gguf

    for name, found in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, inside = found.types[0], found.types[-1] if len(found.types) > 1 else None
        writer.add_key_value(
            name, found.contents(), kind, sub_type=inside if kind == gguf.GGUFValueType.ARRAY else None
        )
    return len(reader.fields["tokenizer.ggml.tokens"].data)


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a server that is ready."""

    file: int
    stored: int  # in the models folder, beside the file
    weights: int  # by the server's own account
    active: int  # all that MLX has in use, states among it
    states: int
    private: int  # of the process: programs' own data, the tokenizer, weights, states
    mapped: int  # of files that it has mapped, programs among them: given up by the system when memory is short

    def line(self, name: str) -> str:
        parts = [
            f"{what} {size / 1e6:.0f} MB ({size / self.file:.2f})"
            for what, size in (
                ("weights", self.weights),
                ("MLX", self.active),
                ("states", self.states),
                ("private", self.private),
                ("mapped", self.mapped),
                ("stored beside it", self.stored),
            )
        ]
        return f"{name}: file {self.file / 1e6:.0f} MB; {', '.join(parts)}"


def measure(path: Path, home: Path) -> Taken:
    """Serve a file and look at the process when it is ready."""
    models = home / "models"
    flags = ["--models-dir", str(models)]
    with servers.ingot(path, home / "log", 1, own_kernels=True, flags=flags) as server:
        said = {
            line.partition(":")[0]: int(line.split()[1]) * 1024
            for line in Path(f"/proc/{server.pid}/smaps_rollup").read_text().splitlines()
            if line.endswith("kB")
        }
        told = io.BytesIO()
        server.client.download("/metrics", told)
        weights, active, states = (_bytes(told.getvalue().decode(), part) for part in ("weights", "active", "states"))
    stored = sum(file.stat().st_size for file in models.rglob("*") if file.is_file())
    anonymous = said["Anonymous"]
    return Taken(path.stat().st_size, stored, weights, active, states, anonymous, said["Rss"] - anonymous)


def _bytes(metrics: str, part: str) -> int:
    found = re.search(rf'^ingot:?_?memory_bytes\{{[^}}]*part="{part}"[^}}]*\}} (\S+)', metrics, re.MULTILINE)
    assert found is not None, part
    return int(float(found[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench.gguf_models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", choices=tuple(SHAPES), default=[])
    parser.add_argument("--file", nargs="*", type=Path, default=[])
    chosen = parser.parse_args(arguments)
    progress = TerminalProgress()
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
        try:
            paths = [*chosen.file, *(write(name, Path(scratch), progress) for name in chosen.shape)]
            progress.finish()
            for number, path in enumerate(paths):
                home = Path(scratch) / str(number)
                home.mkdir()
                print(measure(path, home).line(path.stem), flush=True)
        except IngotError as error:
            print(f"bench.gguf_models: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
