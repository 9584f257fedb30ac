"""Train the cross-encoder: `python -m foundry.rerank.train --minutes M --out DIR`.

Writes DIR/model.safetensors (bfloat16, names as in published checkpoints) and DIR/training.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from foundry.graph import Replays, optimizer_for, set_rate
from foundry.rerank.lessons import PASSAGES, search
from foundry.rerank.rows import LENGTH, Rows, Writers, rows
from foundry.rerank.shape import RATE, config
from foundry.versions import versions

WARM_STEPS = 200
SEARCHES = 48
CAPACITY = 40_000
HELD_OUT = 1000


class Batch(NamedTuple):
    """(pairs, LENGTH); PASSAGES neighbouring pairs belong to one search, the right one first."""

    tokens: torch.Tensor
    segments: torch.Tensor
    there: torch.Tensor


def main() -> None:
    asked = arguments()
    torch.manual_seed(asked.seed)
    torch.set_float32_matmul_precision("high")
    writers = Writers(asked.writers, asked.seed)
    pool = Pool(asked.device)
    pool.add(writers.finished.get(timeout=120))
    network = _network().to(asked.device)
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"rerank: {size / 1e6:.2f} million parameters", flush=True)
    trainer = Trainer(network, pool, writers, asked.device, max(1, SEARCHES // asked.divisor))
    trainer.run(asked.minutes * 60)
    writers.stop()
    asked.out.mkdir(parents=True, exist_ok=True)
    save(network, asked.out / "model.safetensors")
    figures = measured(network, asked.device, asked.share)
    record = {
        "model": "rerank",
        "parameters": size,
        "seed": asked.seed,
        "minutes": asked.minutes,
        "versions": versions(),
        "searches_written": pool.written,
        "steps": trainer.steps,
        "figures": figures,
        "log": trainer.log,
    }
    (asked.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print("rerank", json.dumps(figures), flush=True)
    # The writers' queue may still hold rows, which would keep the process waiting for a reader.
    os._exit(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the foundry's cross-encoder.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--writers", type=int, default=4, help="processes that write searches")
    parser.add_argument("--divisor", type=int, default=1, help="make batches this much smaller")
    parser.add_argument("--share", type=float, default=1.0, help="measure on this share of the samples")
    return parser.parse_args()


def _network() -> Any:
    return BertForSequenceClassification(BertConfig(**config(), attn_implementation="sdpa"))


class Pool:
    """The searches written so far; when it is full, new ones replace the oldest."""

    def __init__(self, device: str) -> None:
        shape = (CAPACITY, PASSAGES, LENGTH)
        self._held = [torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.int16, torch.int8, torch.bool)]
        self._device = device
        self.written = 0

    def add(self, some: Rows) -> None:
        places = ((torch.arange(len(some.tokens)) + self.written) % CAPACITY).to(self._device)
        for held, part in zip(self._held, (some.tokens, some.segments, some.there), strict=True):
            held[places] = torch.from_numpy(part).to(self._device)
        self.written += len(some.tokens)

    def draw(self, count: int) -> Batch:
        chosen = torch.randint(min(self.written, CAPACITY), (count,), device=self._device)
        return _batch([held[chosen] for held in self._held])


def _batch(parts: list[torch.Tensor]) -> Batch:
    tokens, segments, there = (part.flatten(0, 1) for part in parts)
    return Batch(tokens.long(), segments.long(), there)


def scores(network: nn.Module, batch: Batch) -> torch.Tensor:
    """(searches, passages)."""
    # A ready mask: transformers would wait for the device to see whether it needs one.
    found = network(input_ids=batch.tokens, token_type_ids=batch.segments, attention_mask=batch.there[:, None, None, :])
    return found.logits.view(-1, PASSAGES)


class Trainer:
    def __init__(self, network: nn.Module, pool: Pool, writers: Writers, device: str, searches: int) -> None:
        self._network, self._pool, self._writers, self._gpu = network, pool, writers, device == "cuda"
        self._searches = searches
        self._optimizer = optimizer_for(network, RATE, gpu=self._gpu)
        self._replays = Replays(self._update, self._optimizer, gpu=self._gpu)
        self.steps = 0
        self.log: list[dict[str, Any]] = []
        self._seen: list[torch.Tensor] = []

    def run(self, seconds: float) -> None:
        start = said = time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            warm = min(1.0, (self.steps + 1) / WARM_STEPS)
            rate = RATE * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * elapsed / seconds)))
            set_rate(self._optimizer, rate)
            figures = self._replays.run(self._pool.draw(self._searches))
            self.steps += 1
            if self.steps % 10 == 0:
                self._refresh()
                self._seen.append(figures.clone())
            if time.monotonic() - said > 5 and self._seen:
                said = time.monotonic()
                self._say(said - start)

    def _refresh(self) -> None:
        try:
            for _ in range(32):
                self._pool.add(self._writers.finished.get_nowait())
        except queue.Empty:
            return

    def _update(self, batch: Batch) -> torch.Tensor:
        """The loss, and the share of searches whose right passage came first."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._gpu, cache_enabled=False):
            found = scores(self._network, batch).float()
        first = torch.zeros(len(found), dtype=torch.long, device=found.device)
        right = F.one_hot(first, PASSAGES).float()
        # The order of the passages, and also, for each alone, whether it answers: above zero it does.
        loss = F.cross_entropy(found, first) + F.binary_cross_entropy_with_logits(found, right)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0, foreach=True)
        self._optimizer.step()
        return torch.stack([loss.detach(), (found.detach().argmax(-1) == 0).float().mean()])

    def _say(self, elapsed: float) -> None:
        loss, right = torch.stack(self._seen).mean(dim=0).tolist()
        self._seen = []
        line = {"seconds": round(elapsed), "step": self.steps, "loss": round(loss, 4), "first": round(right, 4)}
        self.log.append(line)
        print(
            line,
            f"{self.steps / elapsed:.0f} steps/s, {self._pool.written} written",
            self._replays.eager_because or "",
            flush=True,
        )


@torch.no_grad()
def measured(network: nn.Module, device: str, share: float) -> dict[str, float]:
    """By kind of held-out search, the share of right passages that came first; and of pairs on their side of zero."""
    network.eval()
    searches = [search(seed, held_out=True) for seed in range(max(8, int(HELD_OUT * share)))]
    made = rows(searches)
    tensors = [torch.from_numpy(part).to(device) for part in (made.tokens, made.segments, made.there)]
    parts = zip(*(tensor.split(64) for tensor in tensors), strict=True)
    found = torch.cat([scores(network, _batch(list(some))) for some in parts])
    first: dict[str, list[bool]] = {}
    for one, best in zip(searches, found.argmax(-1).tolist(), strict=True):
        first.setdefault(one.kind, []).append(best == 0)
    figures = {f"first: {kind}": sum(hits) / len(hits) for kind, hits in sorted(first.items())}
    sides = torch.cat([(found[:, :1] > 0).flatten(), (found[:, 1:] <= 0).flatten()]).float()
    network.train()
    return {**figures, "pairs": float(sides.mean())}


@torch.no_grad()
def save(network: nn.Module, path: Path) -> None:
    """Round the network to bfloat16 in place, so that what is measured is what ships, and write it."""
    tensors = {}
    for name, parameter in network.named_parameters():
        kept = parameter.bfloat16()
        parameter.copy_(kept.float())
        tensors[name] = kept.detach().cpu().contiguous().clone()
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
