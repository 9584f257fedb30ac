"""What a model was trained with."""

from __future__ import annotations

import platform

import tokenizers
import torch
import transformers


def versions() -> dict[str, str]:
    found = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"python": platform.python_version(), **found, "device": device}
