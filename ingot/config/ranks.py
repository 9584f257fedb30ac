"""What settings say of several ranks, and what cannot be had with them."""

from __future__ import annotations

from typing import Any, Final

PLAIN: Final = {
    "lora_modules": (),
    "adapter_path": None,
    "allow_runtime_lora_updating": False,
    "models": None,
    "models_config": None,
    "lazy": False,
    "idle_unload_seconds": None,
}
"""Settings that need a whole model, or a whole row's states, in one place, and what they are without."""


def ranks_problem(settings: Any) -> str | None:
    """Of all settings together."""
    if settings.ranks == 1:
        return None
    if settings.tensor_parallel_size > 1 and settings.pipeline_parallel_size > 1:
        return "tensor_parallel_size and pipeline_parallel_size cannot both be more than 1: choose one"
    for name, without in PLAIN.items():
        if getattr(settings, name) != without:
            return f"{name} is not supported with several ranks: leave it out, or run the model on one"
    proposers = [word.strip().partition(":")[0] for word in settings.speculate.split(",")]
    if "eagle" in proposers and settings.pipeline_parallel_size > 1:
        return (
            "speculate eagle is not supported with pipeline_parallel_size: it reads what layers give that other ranks "
            "have. Use tensor_parallel_size, or another proposer"
        )
    return None
