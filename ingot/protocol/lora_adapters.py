"""vLLM's `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, and which adapters requests go through now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.config.loras import is_lora_name
from ingot.engine.request import RequestStatus
from ingot.errors import AdapterError
from ingot.observe.prometheus import Metric, Sample
from ingot.protocol.chat.answers import Note
from ingot.protocol.schema.fields import Text
from ingot.protocol.schema.objects import ObjectOf, refuses, requires
from ingot.protocol.served import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBody:
    lora_name: str = requires(Text(200, least=1), "What to call the adapter.")
    lora_path: str = requires(Text(4096, least=1), "Its folder on the server's machine.")
    load_inplace: None = refuses("is not supported: unload it first.", False)
    is_3d_lora_weight: None = refuses("is not supported: experts are not adapted.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadBody:
    lora_name: str = requires(Text(200, least=1), "The adapter's name.")


LOAD_BODY: Final = ObjectOf(LoadBody)
UNLOAD_BODY: Final = ObjectOf(UnloadBody)


class LoraChanged(Struct, kw_only=True):
    id: str
    object: Literal["lora_adapter"] = "lora_adapter"
    status: Literal["loaded", "unloaded"]
    parent: str
    rank: int | UnsetType = UNSET
    ingot: Note | UnsetType = UNSET


def read_load(value: Any, served: Served) -> tuple[LoadBody, Note | UnsetType]:
    reading = served.reading()
    body: LoadBody = LOAD_BODY.parse(value, "", reading)
    if not is_lora_name(body.lora_name) or body.lora_name in served.terms.every_model:
        raise AdapterError(f"'{body.lora_name}' cannot be an adapter's name, or is in use.", param="lora_name")
    return body, Note.of(reading)


def read_unload(value: Any, served: Served) -> tuple[UnloadBody, Note | UnsetType]:
    reading = served.reading()
    body: UnloadBody = UNLOAD_BODY.parse(value, "", reading)
    return body, Note.of(reading)


def lora_info(model: str, statuses: Sequence[RequestStatus], most: int) -> Metric:
    """As routers read it from vLLM: the value is when it was so."""
    running = sorted({status.adapter for status in statuses if status.adapter and status.phase != "queued"})
    waiting = sorted({status.adapter for status in statuses if status.adapter and status.phase == "queued"})
    labels = {
        "model_name": model,
        "max_lora": str(most),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }
    help = "Adapters that requests go through and wait for, and how many there may be; the value is the time."
    return Metric("vllm:lora_requests_info", "gauge", help, (Sample(round(time.time(), 3), labels),))
