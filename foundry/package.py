"""Make a model folder of a trained model: `python -m foundry.package MODEL TRAINED`.

TRAINED holds the model.safetensors and training.json that `foundry.train` wrote. The folder foundry/models/MODEL gets
them with the configuration, the tokenizer and the chat template, in Hugging Face's layout. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from foundry import dialect, vocabulary
from foundry.shapes import SHAPES, Shape

MODELS = Path(__file__).parent / "models"
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model folder of a trained model.")
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("trained", type=Path)
    asked = parser.parse_args()
    folder = package(asked.model, asked.trained, MODELS / asked.model)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB")


def package(model: str, trained: Path, folder: Path) -> Path:
    shape = SHAPES[model]
    return dress(trained, folder, config(shape), shape.style, shape.config["max_position_embeddings"])


def dress(trained: Path, folder: Path, described: dict[str, Any], style: str, context: int) -> Path:
    """What training wrote, with the configuration and the shared tokenizer."""
    copy_trained(trained, folder)
    put(folder / "config.json", described)
    put(folder / "generation_config.json", {"eos_token_id": ends(), "pad_token_id": ends()[-1], "do_sample": False})
    put(folder / "tokenizer_config.json", tokenizer_config(style, context))
    shutil.copyfile(vocabulary.PATH, folder / "tokenizer.json")
    return folder


def copy_trained(trained: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "training.json"):
        (folder / name).write_bytes((trained / name).read_bytes())


def ends() -> list[int]:
    return [vocabulary.encoded(mark)[0] for mark in (dialect.TURN_END, vocabulary.DOCUMENT_END)]


def config(shape: Shape) -> dict[str, Any]:
    """Qwen3.5's text model lies inside a larger model's configuration, as in the published checkpoints."""
    text = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "eos_token_id": ends()[0],
        **shape.config,
        **shape.extra,
    }
    top = {"architectures": [ARCHITECTURES[shape.family]]}
    if shape.family != "qwen3_5_text":
        return {**top, **text}
    return {**top, "model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}


def tokenizer_config(style: str, context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": dialect.TURN_END,
        "pad_token": vocabulary.DOCUMENT_END,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": dialect.template_text(style),
    }


def put(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
