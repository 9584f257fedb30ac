"""One update of a language model: forward, loss, backward, optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foundry.feed import TASKS, Batch
from foundry.graph import Replays, optimizer_for, set_rate
from foundry.network import Network
from foundry.rows import LONG, SHORT

TASK_WEIGHTS = (0.6, 1.0, 1.0)
MTP_WEIGHT = 0.3
COMPILED = (SHORT, LONG)
"""Lengths of rows that come often enough to be worth compiling for, where the network is to be compiled."""
FIGURES = (*TASKS, "mtp", "recalled")


class Updater:
    """Updates `network` on batches."""

    def __init__(self, network: Network, device: str, *, rate: float) -> None:
        self._network = network
        self._gpu = device == "cuda"
        self._optimizer = optimizer_for(network, rate, gpu=self._gpu)
        self._task_weights = torch.tensor(TASK_WEIGHTS, device=device)
        self._replays = Replays(self._update, self._optimizer, gpu=self._gpu)

    @property
    def eager_because(self) -> str | None:
        return self._replays.eager_because

    def set_rate(self, rate: float) -> None:
        set_rate(self._optimizer, rate)

    def update(self, batch: Batch) -> torch.Tensor:
        """Returns the FIGURES of the batch, on the device; they hold until the next update."""
        if self._replays.known(batch):
            return self._replays.run(batch)
        with torch.compiler.set_stance("default" if batch.tokens.shape[1] in COMPILED else "force_eager"):
            return self._replays.run(batch)

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
