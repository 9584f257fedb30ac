"""How much is measured: all of it, less of it, or just enough to see that it works, on a CPU that acts as a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.random_models import SHAPES


@dataclass(frozen=True)
class Scale:
    prompt: int = 512
    output: int = 96
    streams: tuple[int, ...] = (1, 8, 32)
    long: int = 32768
    turn: int = 87_000  # tokens of an agent's conversation
    rows: int = 8  # of attention
    depth: int = 8192
    wide_depth: int = 32768
    repeats: int = 30
    tokens: int = 2048  # of the gated delta rule
    memory_gb: float = 40.0
    tiny: bool = False

    @property
    def dense(self) -> dict[str, Any]:
        return SHAPES["dispatch" if self.tiny else "llama-8b"]

    @property
    def hybrid(self) -> dict[str, Any]:
        return hybrid(64, 128, 4, 2, 32, 512) if self.tiny else hybrid(4096, 12288, 32, 16, 128, 248320)


FULL = Scale()
QUICK = Scale(output=32, streams=(1, 8), repeats=10)
TINY = Scale(
    prompt=12, output=4, streams=(1, 2), long=200, turn=700, rows=2, depth=100, wide_depth=80, repeats=1, tokens=70,
    memory_gb=0.2, tiny=True,
)  # fmt: skip


def hybrid(hidden: int, inner: int, layers: int, key_heads: int, size: int, vocab: int) -> dict[str, Any]:
    """Qwen 3.5's: three layers of the gated delta rule, with twice as many value heads, then one of attention."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": key_heads,
        "num_key_value_heads": max(1, key_heads // 4),
        "head_dim": 2 * size,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": 2 * key_heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
