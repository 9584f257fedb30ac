"""Updates of a network replayed as CUDA graphs.

Models this small wait for their launches, not for their arithmetic. A graph launches a whole update at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPDATES = 3


class Replays:
    """Runs `update` on batches, which are named tuples of tensors; on a GPU, those of one shape share a graph.

    `update` leaves everything on the device and returns a tensor, which holds until the next update.
    """

    def __init__(self, update: Callable[[Any], torch.Tensor], optimizer: torch.optim.Optimizer, *, gpu: bool) -> None:
        self._update, self._optimizer, self._gpu = update, optimizer, gpu
        self._replays: dict[tuple[torch.Size, ...], Replay] = {}
        self.eager_because: str | None = None

    def known(self, batch: Any) -> bool:
        """Whether running this batch records nothing."""
        return not self._gpu or self.eager_because is not None or _key(batch) in self._replays

    def run(self, batch: Any) -> torch.Tensor:
        if not self._gpu or self.eager_because:
            return self._update(batch)
        if _key(batch) not in self._replays:
            figures = self._warm(batch)
            self._record(batch)
            return figures
        return self._replays[_key(batch)].run(batch)

    def _warm(self, batch: Any) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPDATES):
                figures = self._update(batch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return figures

    def _record(self, batch: Any) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        held = type(batch)(*(tensor.clone() for tensor in batch))
        try:
            with torch.cuda.graph(graph):
                figures = self._update(held)
        except RuntimeError as error:
            # Slower, and as good: what cannot be captured can still be run.
            self.eager_because = str(error).splitlines()[0]
            self._optimizer.zero_grad(set_to_none=True)
            return
        self._replays[_key(batch)] = Replay(graph, held, figures)


class Replay:
    def __init__(self, graph: torch.cuda.CUDAGraph, held: Any, figures: torch.Tensor) -> None:
        self._graph, self._held, self._figures = graph, held, figures

    def run(self, batch: Any) -> torch.Tensor:
        for held, new in zip(self._held, batch, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._figures


def _key(batch: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in batch)


def optimizer_for(network: torch.nn.Module, rate: float, *, gpu: bool) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices alone."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    # Inside a graph the rate must be a tensor, or the first one would stay.
    first = torch.tensor(rate, device="cuda") if gpu else rate
    return torch.optim.AdamW(groups, lr=first, betas=(0.9, 0.95), fused=gpu, capturable=gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
