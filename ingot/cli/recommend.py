"""`ingot models --recommend`: which models of the table of short names this machine has memory for, by task; and the
line that `ingot serve` prints about them where it was given no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from ingot.config import Settings
from ingot.config.checks import memory_bytes
from ingot.extras import extras_command, missing_packages
from ingot.models.files.short_names import TASKS, Task
from ingot.quantities import format_bytes

if TYPE_CHECKING:
    from ingot.engine.loading.recommend import Recommendation
    from ingot.kernels.device import Device

TASK_EXTRAS: Final[dict[Task, str]] = {"vision": "vision", "audio": "audio"}
"""The optional packages that a task needs."""


def print_recommended(settings: Settings, *, as_json: bool) -> None:
    from ingot.engine.loading.recommend import recommend_models
    from ingot.kernels.device import current_device, memory_budget

    device = current_device()
    other = settings.memory if settings.memory is not None and "%" not in settings.memory else None
    budget = memory_budget(device, settings.memory) if other is None else memory_bytes(other, total=1 << 62)
    found = recommend_models(budget, device.kind)
    if as_json:
        about = {"device": device.name, "kind": device.kind, "memory_budget": budget}
        print(json.dumps({**about, "models": [asdict(each) for each in found]}, indent=2))
    else:
        print(_format_recommended(found, device, budget))


def _format_recommended(found: Sequence[Recommendation], device: Device, budget: int) -> str:
    memory = {"metal": "unified memory", "cuda": "GPU memory", "cpu": "memory"}[device.kind]
    lines = [f"{device.name}: models may take {format_bytes(budget)} of {memory} (--memory changes that)"]
    if budget > device.memory:
        lines = [f"{device.name} with {format_bytes(budget)} of {memory}, which is more than this machine has"]
    slow = "; those whose tokens would take long on a CPU are left out" if device.kind == "cpu" else ""
    width = max((len(each.command) for each in found), default=0)
    for task, (words, _) in TASKS.items():
        rows = [each for each in found if each.task == task]
        extra = TASK_EXTRAS.get(task)
        needs = f" (after `{extras_command(extra)}`)" if extra is not None and missing_packages(extra) else ""
        lines += ["", f"{words}{needs if rows else ': nothing that is known by a short name fits'}"]
        lines += [f"  {_format_row(each, width)}" for each in rows]
    if found:
        lines += ["", f"The best of each kind comes first{slow}. All are 4-bit unless they are small."]
    return "\n".join(lines)


def _format_row(each: Recommendation, width: int) -> str:
    active = f" ({each.active:g}B a token)" if each.active != each.parameters else ""
    size = f"{each.parameters:g}B{active}" if each.parameters >= 1 else f"{each.parameters * 1000:g}M"
    context = f"context {each.context:,}" if each.context else ""
    return f"{each.command:<{width}}  {size:<20}  {format_bytes(each.download_bytes):>8}  {context}".rstrip()


def offer_models(settings: Settings, budget: int, device: str) -> str | None:
    """What to tell a user who started a server without naming a model: the best chat models that fit, where they can be
    fetched. Takes as long as the hub takes to be reached."""
    from ingot.engine.loading.recommend import recommend_models

    chat = [each for each in recommend_models(budget, device) if each.task == "chat"][:OFFERED]
    if not chat or settings.offline or not hub_answers():
        return None
    named = " or ".join(f"`{each.command}` ({format_bytes(each.download_bytes)} to fetch)" for each in chat)
    return f"tip: {settings.model} is small, and this machine has memory for more: {named}; `ingot models --recommend`"


OFFERED: Final = 2


HUB_ANSWERS_S: Final = 1.0


def hub_answers() -> bool:
    """Whether the hub can be reached, by a connection and no more."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE  # the user's own settings for the hub

    address = urlsplit(ENDPOINT)
    if HF_HUB_OFFLINE or address.hostname is None:
        return False
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), HUB_ANSWERS_S).close()
    except OSError:
        return False
    return True
