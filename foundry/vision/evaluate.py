"""How well the shipped vision model answers: `python -m foundry.vision.evaluate [--share S]`. Held out, no torch.

Prints each figure and writes them to the model's evaluation.json.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from foundry.package import MODELS
from foundry.vision.layouts import LAYOUTS, examples
from foundry.vision.reader import Reader

SIGHTS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the shipped vision model.")
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    share = parser.parse_args().share
    figures = accuracy(Reader(MODELS / "vision"), range(max(2, int(SIGHTS * share))))
    for name, value in figures.items():
        print(f"vision {name}: {value:.4f}")
    (MODELS / "vision" / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")


def accuracy(model: Reader, seeds: range) -> dict[str, float]:
    """The share of right answers: about pictures, about clips, and by kind of question and by layout."""
    right: dict[str, list[bool]] = {"pictures": [], "clips": []}
    for name, layout in LAYOUTS.items():
        for seed in seeds:
            sight, asked = examples(layout, seed, held_out=True)
            seen = model.see(sight)
            for question, read in asked:
                answered = model.answers(seen, read)
                for group in ("clips" if layout.clip else "pictures", f"question: {question.kind}", f"layout: {name}"):
                    right.setdefault(group, []).append(answered)
    return {group: round(float(np.mean(answers)), 4) for group, answers in right.items()}


if __name__ == "__main__":
    main()
