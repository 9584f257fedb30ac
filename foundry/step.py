"""One update of a network: forward, loss, backward, optimizer; on a GPU replayed as a CUDA graph.

Models this small wait for their launches, not for their arithmetic. A graph launches a whole update at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from foundry.feed import TASKS, Batch
from foundry.network import Network
from foundry.rows import LONG, SHORT

TASK_WEIGHTS = (0.6, 1.0, 1.0)
MTP_WEIGHT = 0.3
WARM_UPDATES = 3
COMPILED = (SHORT, LONG)
"""Lengths of rows that come often enough to be worth compiling for, where the network is to be compiled."""
FIGURES = (*TASKS, "mtp", "recalled")


class Updater:
    """Updates `network` on batches. Batches of one shape always take the same graph."""

    def __init__(self, network: Network, device: str, *, rate: float) -> None:
        self._network = network
        self._gpu = device == "cuda"
        # Inside a graph the rate must be a tensor, or the first one would stay.
        first = torch.tensor(rate, device=device) if self._gpu else rate
        self._optimizer = torch.optim.AdamW(
            _groups(network), lr=first, betas=(0.9, 0.95), fused=self._gpu, capturable=self._gpu
        )
        self._task_weights = torch.tensor(TASK_WEIGHTS, device=device)
        self._replays: dict[torch.Size, Replay] = {}
        self.eager_because: str | None = None

    def set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            if self._gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update(self, batch: Batch) -> torch.Tensor:
        """Returns the FIGURES of the batch, on the device; they hold until the next update."""
        if not self._gpu or self.eager_because:
            return self._update(batch)
        shape = batch.tokens.shape
        if shape not in self._replays:
            with torch.compiler.set_stance("default" if batch.tokens.shape[1] in COMPILED else "force_eager"):
                figures = self._warm(batch)
                self._record(batch)
            return figures
        return self._replays[shape].run(batch)

    def _warm(self, batch: Batch) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPDATES):
                figures = self._update(batch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return figures

    def _record(self, batch: Batch) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        held = Batch(batch.tokens.clone(), batch.weights.clone(), batch.tasks.clone())
        try:
            with torch.cuda.graph(graph):
                figures = self._update(held)
        except RuntimeError as error:
            # Slower, and as good: what cannot be captured can still be run.
            self.eager_because = str(error).splitlines()[0]
            self._optimizer.zero_grad(set_to_none=True)
            return
        self._replays[batch.tokens.shape] = Replay(graph, held, figures)

    def _update(self, batch: Batch) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._gpu, cache_enabled=False):
            hidden = self._network.hidden(batch.tokens)
            means, accuracy = self._losses(hidden[:, :-1], batch, 1)
            loss = (means * self._task_weights).sum()
            further = torch.zeros_like(loss)
            if self._network.mtp is not None:
                states = self._network.further(hidden, batch.tokens)
                further = (self._losses(states[:, :-1], batch, 2)[0] * self._task_weights).sum()
                loss = loss + MTP_WEIGHT * further
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0, foreach=True)
        self._optimizer.step()
        return torch.cat([means.detach(), further.detach()[None], accuracy[None]])

    def _losses(self, states: torch.Tensor, batch: Batch, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of each task at predicting the token `ahead` places on; the share of right recall answers."""
        targets, weights = batch.tokens[:, ahead:], batch.weights[:, ahead:]
        logits = self._network.logits(states).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        zeros = torch.zeros(len(TASKS), device=weights.device)
        counts = zeros.index_add(0, batch.tasks, weights.sum(dim=1)).clamp_min(1e-6)
        right = (logits.detach().argmax(-1) == targets) * weights
        accuracy = zeros.index_add(0, batch.tasks, right.sum(dim=1))[-1] / counts[-1]
        return zeros.index_add(0, batch.tasks, (losses * weights).sum(dim=1)) / counts, accuracy


class Replay:
    def __init__(self, graph: torch.cuda.CUDAGraph, held: Batch, figures: torch.Tensor) -> None:
        self._graph, self._held, self._figures = graph, held, figures

    def run(self, batch: Batch) -> torch.Tensor:
        self._held.tokens.copy_(batch.tokens)
        self._held.weights.copy_(batch.weights)
        self._held.tasks.copy_(batch.tasks)
        self._graph.replay()
        return self._figures


def _groups(network: Network) -> list[dict[str, Any]]:
    """Weight decay for matrices alone."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
