"""How well a network answers held-out questions. Runs in PyTorch, right after training.

An answer counts when the likeliest token is the right one at each of its places, given the right ones before:
precisely then greedy decoding writes it.
"""

from __future__ import annotations

import numpy as np
import torch

from foundry.vision.feed import Pool
from foundry.vision.layouts import LAYOUTS, QUESTIONS, rows
from foundry.vision.network import Seer

SAMPLES = 128


@torch.no_grad()
def measured(network: Seer, device: str, *, share: float = 1.0) -> dict[str, float]:
    """By layout, the share of right answers."""
    network.eval()
    count = max(2, int(SAMPLES * share))
    figures = {}
    for name, layout in LAYOUTS.items():
        pool = Pool(device, count)
        pool.add(rows(layout, list(range(count)), held_out=True))
        right = []
        for asked in range(QUESTIONS):
            for start in range(0, count, 32):
                places = torch.arange(start, min(count, start + 32), device=device)
                batch = pool.taken(places, torch.full_like(places, asked))
                guessed = network.logits(network.hidden(batch)).argmax(-1)
                wrong = ((guessed[:, :-1] != batch.tokens[:, 1:]) & (batch.weights[:, 1:] > 0)).any(dim=1)
                right += (~wrong).tolist()
        figures[name] = float(np.mean(right))
    network.train()
    return figures
