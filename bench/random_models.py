"""Models with random weights and a byte tokenizer, for measurements that do not depend on the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SMALL = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **SMALL,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # Its arithmetic is nothing, so that what is measured is the cost of running steps at all.
    "dispatch": _llama(64, 128, 8, 4, 2, 512),
    # Few layers and heads, to stand beside a larger one.
    "llama-5m": _llama(128, 512, 2, 2, 1, 32000),
    # To read its weights takes most of a step's time where few tokens are computed.
    "llama-15m": _llama(256, 1024, 6, 4, 2, 32000),
    "llama-150m": _llama(1024, 4096, 8, 16, 4, 32000),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256),
    "llama-600m": _llama(1024, 3072, 28, 16, 8, 128256),
    "llama-1.7b": _llama(2048, 6144, 28, 16, 8, 128256),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-32b": _llama(5120, 27648, 64, 40, 8, 128256),
}


def build(
    config: dict[str, Any], *, seed: int = 0, spread: float = 0.0, dtype: Any = None, lazily: bool = False
) -> Any:
    """A model of mlx-lm's with random weights; `spread` widens them so that greedy choices are far from ties. `lazily`:
    they are not made yet."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    from ingot.upstream import import_upstream

    family = (
        config["model_type"].removesuffix("_text") if config["model_type"] == "qwen3_5_text" else config["model_type"]
    )
    module = import_upstream(f"mlx_lm.models.{family}")
    text_only = config["model_type"] == "qwen3_5_text"
    model_class, args_class = (
        (module.TextModel, module.TextModelArgs) if text_only else (module.Model, module.ModelArgs)
    )
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    if spread:
        model.update(
            tree_map_with_path(
                lambda path, x: x if "norm" in path else x + spread * mx.random.normal(x.shape), model.parameters()
            )
        )
    if dtype is not None:
        model.set_dtype(dtype)
    if not lazily:
        mx.eval(model.parameters())
    model.eval()
    return model


def decided(config: dict[str, Any], *, seed: int = 0, dtype: Any = None) -> Any:
    """A model whose greedy token is a function of the one before, by a margin that no way of rounding comes near: so
    its tokens do not depend on how many are computed at once. It reads and multiplies as much as others of its shape.

    A token's embedding is by far the largest part of what the last layer gives, and the row of the head that is most
    like it is that of the next token. So the head is its own, even where the shape's is the embedding.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    model = build({**config, "tie_word_embeddings": False}, seed=seed, dtype=dtype)
    embedding = mx.random.normal((config["vocab_size"], config["hidden_size"]))
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": mx.roll(embedding, 1, axis=0)}
    for name, weight in tree_flatten(model.parameters()):
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] = weight / config["num_hidden_layers"]
    model.update(tree_unflatten(list(weights.items())))
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def write_tokenizer(folder: Path, vocab: int, template: str = PLAIN) -> None:
    """A token for each printable character, and words for the rest: whatever a model draws is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    words = letters[: vocab - 1] + [f"Ġw{number}" for number in range(len(letters), vocab - 1)]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write(folder: Path, shape: str) -> None:
    """A folder that any server of MLX models can load."""
    write_model(folder, SHAPES[shape], build(SHAPES[shape]))


def write_model(folder: Path, config: dict[str, Any], model: Any, template: str = PLAIN) -> Path:
    """The same, with these weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    write_tokenizer(folder, config["vocab_size"], template)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": config["vocab_size"] - 1}))
    return folder
