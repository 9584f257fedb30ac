"""Train the vision model: `python -m foundry.vision.train --minutes M --out DIR`.

Writes DIR/model.safetensors (bfloat16, names as in published checkpoints) and DIR/training.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from foundry.graph import Replays, optimizer_for, set_rate
from foundry.versions import versions
from foundry.vision.feed import Batch, Feed
from foundry.vision.measure import measured
from foundry.vision.network import Seer
from foundry.vision.shape import RATE

WARM_STEPS = 200


def main() -> None:
    asked = arguments()
    torch.manual_seed(asked.seed)
    torch.set_float32_matmul_precision("high")
    feed = Feed(asked.device, processes=asked.writers, seed=asked.seed, divisor=asked.divisor)
    network = Seer().to(asked.device)
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"vision: {size / 1e6:.2f} million parameters", flush=True)
    trainer = Trainer(network, feed, asked.device)
    trainer.run(asked.minutes * 60)
    written = feed.written
    feed.stop()
    asked.out.mkdir(parents=True, exist_ok=True)
    save(network, asked.out / "model.safetensors")
    figures = measured(network, asked.device, share=asked.share)
    record = {
        "model": "vision",
        "parameters": size,
        "seed": asked.seed,
        "minutes": asked.minutes,
        "versions": versions(),
        "rows_written": written,
        "steps": trainer.steps,
        "figures": figures,
        "log": trainer.log,
    }
    (asked.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print("vision", json.dumps(figures), flush=True)
    # The writers' queues may still hold rows, which would keep the process waiting for a reader.
    os._exit(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the foundry's vision model.")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--writers", type=int, default=12, help="processes that draw and write")
    parser.add_argument("--divisor", type=int, default=1, help="make batches this much smaller")
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    return parser.parse_args()


class Trainer:
    def __init__(self, network: Seer, feed: Feed, device: str) -> None:
        self._network, self._feed, self._gpu = network, feed, device == "cuda"
        self._optimizer = optimizer_for(network, RATE, gpu=self._gpu)
        self._replays = Replays(self._update, self._optimizer, gpu=self._gpu)
        self.steps = 0
        self.log: list[dict[str, Any]] = []
        self._seen: list[torch.Tensor] = []

    def run(self, seconds: float) -> None:
        start = said = time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            warm = min(1.0, (self.steps + 1) / WARM_STEPS)
            progress = elapsed / seconds
            set_rate(self._optimizer, RATE * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))))
            figures = self._replays.run(self._feed.batch())
            self.steps += 1
            if self.steps % 10 == 0:
                self._feed.refresh()
                self._seen.append(figures.clone())
            if time.monotonic() - said > 5 and self._seen:
                said = time.monotonic()
                self._say(said - start)

    def _update(self, batch: Batch) -> torch.Tensor:
        """The loss, and the share of tokens that were right."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._gpu, cache_enabled=False):
            logits = self._network.logits(self._network.hidden(batch)[:, :-1]).float()
        targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        count = weights.sum().clamp_min(1.0)
        loss = (losses * weights).sum() / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0, foreach=True)
        self._optimizer.step()
        right = ((logits.detach().argmax(-1) == targets) * weights).sum() / count
        return torch.stack([loss.detach(), right])

    def _say(self, elapsed: float) -> None:
        loss, right = torch.stack(self._seen).mean(dim=0).tolist()
        self._seen = []
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} after {self.steps} steps")
        line = {"seconds": round(elapsed), "step": self.steps, "loss": round(loss, 4), "right": round(right, 4)}
        self.log.append(line)
        written = sum(self._feed.written.values())
        print(
            line,
            f"{self.steps / elapsed:.0f} steps/s, {written} written",
            self._replays.eager_because or "",
            flush=True,
        )


@torch.no_grad()
def save(network: Seer, path: Path) -> None:
    """Round the network to bfloat16 in place, so that what is measured is what ships, and write it."""
    tensors = {}
    for name, parameter in network.lm.named_parameters():
        kept = parameter.bfloat16()
        parameter.copy_(kept.float())
        if name != "lm_head.weight":
            tensors[name] = kept.detach().cpu().contiguous().clone()
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
