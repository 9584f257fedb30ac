"""How good a network is, on held-out seeds and documents. Runs in PyTorch, right after training.

A completion counts as exact when the likeliest token is the right one at each of its places, given the right ones
before: precisely then greedy decoding writes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from foundry.lesson import Lesson
from foundry.network import Network
from foundry.recall import PAIR, probe_rows
from foundry.rows import SHORT, lesson, prose_tokens, written

PROBES = {256: 64, 1024: 64, 2048: 32, 4096: 16}
QUESTIONS = 32
LESSONS = 1200


@torch.no_grad()
def measured(network: Network, style: str, device: str, *, share: float = 1.0) -> dict[str, Any]:
    """All figures. `share` below 1 takes that part of the samples."""
    network.eval()
    figures: dict[str, Any] = {"perplexity": perplexity(network, device, share)}
    figures["recall"] = {
        length: recall(network, length, max(1, int(count * share)), device) for length, count in PROBES.items()
    }
    figures |= answers(network, style, device, max(8, int(LESSONS * share)))
    network.train()
    return figures


def perplexity(network: Network, device: str, share: float) -> float:
    tokens = torch.from_numpy(prose_tokens(held_out=True)).to(device)
    rows = tokens[: len(tokens) // SHORT * SHORT].view(-1, SHORT)
    rows = rows[: max(1, int(len(rows) * share))]
    losses = []
    for some in rows.split(16):
        logits = network.logits(network.hidden(some))
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), some[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def recall(network: Network, length: int, count: int, device: str) -> float:
    rows = probe_rows(length, count, length, QUESTIONS)
    tokens, wanted = torch.from_numpy(rows.tokens), torch.from_numpy(rows.weights > 0)
    right = []
    for some, asked in zip(tokens.to(device).split(8), wanted.to(device).split(8), strict=True):
        guessed = network.logits(network.hidden(some)[:, -PAIR * QUESTIONS - 1 :]).argmax(-1)
        asked = asked[:, -PAIR * QUESTIONS :]
        right.append((guessed[:, :-1] == some[:, -PAIR * QUESTIONS :])[asked])
    return float(torch.cat(right).float().mean())


def answers(network: Network, style: str, device: str, count: int) -> dict[str, Any]:
    """The share of exact completions of each kind of lesson, and the MTP head's acceptance."""
    exact: dict[str, list[bool]] = {}
    accepted: list[torch.Tensor] = []
    taught = sorted((lesson(seed, held_out=True) for seed in range(count)), key=_length)
    for start in range(0, count, 32):
        some = taught[start : start + 32]
        tokens, wanted = _padded([written(one, style) for one in some], device)
        hidden = network.hidden(tokens)
        guessed = network.logits(hidden).argmax(-1)
        wrong = ((guessed[:, :-1] != tokens[:, 1:]) & wanted[:, 1:]).any(dim=1)
        for one, failed in zip(some, wrong.tolist(), strict=True):
            exact.setdefault(one.kind, []).append(not failed)
        if network.mtp is not None:
            further = network.logits(network.further(hidden, tokens)).argmax(-1)
            accepted.append((further[:, :-1] == guessed[:, 1:-1])[wanted[:, 2:]])
    figures: dict[str, Any] = {"exact": {kind: float(np.mean(values)) for kind, values in sorted(exact.items())}}
    if accepted:
        figures["mtp_acceptance"] = float(torch.cat(accepted).float().mean())
    return figures


def _length(taught: Lesson) -> int:
    return sum(len(str(message["content"])) for message in taught.messages) + len(str(taught.tools))


def _padded(pairs: list[tuple[list[int], list[int]]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(asked) + len(answer) for asked, answer in pairs)
    tokens = torch.zeros((len(pairs), longest), dtype=torch.long)
    wanted = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for row, (asked, answer) in enumerate(pairs):
        tokens[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        wanted[row, len(asked) : len(asked) + len(answer)] = True
    return tokens.to(device), wanted.to(device)
