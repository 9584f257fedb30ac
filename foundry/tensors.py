"""Trained weights as a safetensors file with the names that published checkpoints use."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from foundry.network import Network


@torch.no_grad()
def save(network: Network, path: Path) -> None:
    """Round the network to bfloat16 in place, so that what is measured is what ships, and write it."""
    tensors = {}
    for name, parameter in network.named_parameters():
        kept = parameter if name.endswith("A_log") else parameter.bfloat16()
        parameter.copy_(kept.float())
        if published := _published(name, hybrid=network.mtp is not None):
            tensors[published] = kept.detach().cpu().contiguous().clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _published(name: str, *, hybrid: bool) -> str | None:
    """Qwen3.5 keeps its text model in `model.language_model` and its MTP head beside it. Heads are tied."""
    if name.startswith("mtp."):
        return name
    name = name.removeprefix("lm.")
    if name == "lm_head.weight":
        return None
    return name.replace("model.", "model.language_model.", 1) if hybrid else name
