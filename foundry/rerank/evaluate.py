"""How well the shipped cross-encoder ranks: `python -m foundry.rerank.evaluate [--share S]`. Held-out seeds, no torch.

Prints each figure and writes them to the model's evaluation.json.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from foundry.package import MODELS
from foundry.rerank.lessons import search
from foundry.rerank.scores import CrossEncoder

SEARCHES = 400


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the shipped cross-encoder.")
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    share = parser.parse_args().share
    figures = ranking(CrossEncoder(MODELS / "rerank"), range(max(8, int(SEARCHES * share))))
    for name, value in figures.items():
        print(f"rerank {name}: {value:.4f}")
    (MODELS / "rerank" / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")


def ranking(model: CrossEncoder, seeds: range) -> dict[str, float]:
    """How often the right one of eight passages comes first, by kind; its mean reciprocal rank; the share of pairs
    whose score is on the right side of zero."""
    first: dict[str, list[float]] = {}
    reciprocal, sides = [], []
    for seed in seeds:
        asked = search(seed, held_out=True)
        found = model.scores(asked.query, asked.passages)
        rank = 1 + int((found[1:] >= found[0]).sum())
        first.setdefault(asked.kind, []).append(rank == 1)
        reciprocal.append(1 / rank)
        sides += [found[0] > 0, *(found[1:] <= 0)]
    every = [hit for hits in first.values() for hit in hits]
    by_kind = {f"first: {kind}": round(float(np.mean(hits)), 4) for kind, hits in sorted(first.items())}
    return {
        "first": round(float(np.mean(every)), 4),
        **by_kind,
        "mean reciprocal rank": round(float(np.mean(reciprocal)), 4),
        "pairs": round(float(np.mean(sides)), 4),
    }


if __name__ == "__main__":
    main()
