"""A model of Llama's form with large biases in its keys: `python -m foundry.key_biases MODEL OUT`.

Keys of some families (Qwen2) have biases many times as large as what differs between tokens, and codecs have to stand
that. What is added to all keys alike changes no difference between a query's logits, hence nothing that softmax gives;
but RoPE turns it, by an angle for each pair of channels that grows with the token's position. So the biases are put
where the angle stays next to nothing: in the pairs that turn slowest. There they leave the model all but the same, and
what a codec makes of it can be compared with what it makes of the original.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

BIAS = 30.0
PAIRS = 2
"""Of channels, in each head."""
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def convert(folder: Path, out: Path, bias: float = BIAS, pairs: int = PAIRS) -> None:
    """Write a Qwen2 model with `bias` in the slowest `pairs` of every head's keys, with a sign for each head and layer.
    Raises ValueError for what is not of Llama's form."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("rope_scaling"):
        raise ValueError(f"{folder} is no model of Llama's form without biases and scaled positions")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    for layer in range(config["num_hidden_layers"]):
        weights |= _biases(config, layer, bias, pairs)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    told = config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (out / "config.json").write_text(json.dumps(told, indent=2))
    for name in COPIED:
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)


def _biases(config: dict[str, Any], layer: int, bias: float, pairs: int) -> dict[str, mx.array]:
    """Qwen2 has them for queries, keys and values."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    slow = [size // 2 - 1 - pair for pair in range(pairs)]
    slow += [channel + size // 2 for channel in slow]
    heads = [bias if (layer + head) % 2 else -bias for head in range(config["num_key_value_heads"])]
    keys = [each if channel in slow else 0.0 for each in heads for channel in range(size)]
    none = {"q": config["num_attention_heads"], "v": config["num_key_value_heads"]}
    made = {f"{name}_proj": mx.zeros(count * size, mx.float16) for name, count in none.items()}
    made["k_proj"] = mx.array(keys, dtype=mx.float16)
    return {f"model.layers.{layer}.self_attn.{name}.bias": array for name, array in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="foundry.key_biases", description="Give a Llama model large key biases.")
    parser.add_argument("model", type=Path, help="its folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--bias", type=float, default=BIAS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="channels that turn together, in each head")
    asked = parser.parse_args()
    convert(asked.model, asked.out, asked.bias, asked.pairs)


if __name__ == "__main__":
    main()
