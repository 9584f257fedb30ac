"""What specprefill loses if the served model's own first layers choose the tokens, by the attention of the last tokens
there; compared with token statistics and a draft model, on the foundry's models.

python -m bench.sparse_layers --model dense --length 1024 --samples 8
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from typing import Any

from bench.sparse_quality import KEEPS, ByDraft, Judge, by_statistics, recalls, tallied
from foundry.package import MODELS
from foundry.shapes import SHAPES
from ingot.cache.batch_state import BatchState
from ingot.engine.specprefill.scorers import AttentionCapture
from ingot.engine.specprefill.selection import ScoredPrompt

ASKING = 32
"""Tokens at the end of a prompt that ask."""
PIECE = 512


class FirstLayers(AttentionCapture):
    def __init__(self, rows: BatchState, count: int) -> None:
        super().__init__(rows)
        self.layers = self.layers[:count]


def by_layers(adapter: Any, count: int) -> Judge:
    """The scores of so many of the first layers that see all of a prompt."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    def judge(prompt: tuple[int, ...]) -> ScoredPrompt:
        rows = adapter.new_batch_state()
        row, tokens, asking = rows.new(), mx.array(prompt, dtype=mx.uint32), len(prompt) - ASKING
        for begin in range(0, asking, PIECE):
            piece = tokens[begin : min(begin + PIECE, asking)]
            mx.eval(adapter.run(rows, piece, [ForwardPart((row,), piece.size)], [piece.size - 1]), rows.pending())
        stated = mx.arange(asking, len(prompt), dtype=mx.int32)
        with FirstLayers(rows, count) as asked:
            last = adapter.run(rows, tokens[asking:], [ForwardPart((row,), ASKING, stated, len(prompt))], [ASKING - 1])
            mx.eval(last, rows.pending(), asked.pending())
        return asked.scored(row, len(prompt))

    return judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "draft"], default="dense")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8)
    asked = parser.parse_args()
    from ingot.kernels.device import current_device
    from ingot.models import adapter as adapters

    here, path = current_device(), MODELS / asked.model
    target, apart = (
        adapters.load_model_adapter(path, here),
        adapters.load_model_adapter(path, here, apart=here.kind == "cpu"),
    )
    layers = len(AttentionCapture(apart.new_batch_state()).layers)
    judges: dict[str, Judge] = {f"first {count} of {layers}": by_layers(apart, count) for count in range(1, layers)}
    judges["statistics"] = by_statistics
    judges["draft"] = ByDraft(adapters.load_model_adapter(MODELS / "draft", here))
    samples = list(islice(recalls(SHAPES[asked.model].style, asked.length, 0), asked.samples))
    found, _ = tallied(target, judges, samples)
    print(f"{asked.model}: right answers (and their perplexity) by computed fraction")
    print(f"| chosen by | {' | '.join(map(str, KEEPS))} |", "|---" * (1 + len(KEEPS)) + "|", sep="\n")
    for name in judges:
        print(f"| {name} | {' | '.join(str(found[samples[0].task, name, str(keep)]) for keep in KEEPS)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
