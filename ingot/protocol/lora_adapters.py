"""LoRA adapters on the wire: which one a request goes through, and vLLM's `POST /v1/load_lora_adapter` and
`/v1/unload_lora_adapter`.

A request's `model` may be an adapter's name, alone or behind a model's (`base:name`), or its `adapter` is. Pure
translation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.config.checks import is_lora_name
from ingot.engine.request import LoraRef, RequestStatus
from ingot.errors import AdapterError, BadRequest, ModelNotFound
from ingot.observe.metrics import Metric, MetricSample
from ingot.protocol.chat.answers import IgnoredNote
from ingot.protocol.schema.fields import BodyReading, FieldKind, Schema, Text
from ingot.protocol.schema.model_fields import adapter_named_in
from ingot.protocol.schema.objects import ObjectOf, refuses, requires
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import Terms

ABOUT_ADAPTER: Final = "The LoRA adapter to go through; `model` may name it, too."


@dataclass(frozen=True, slots=True)
class AdapterField(FieldKind):
    """An adapter's name. Any other is a 404 that lists them."""

    types, words = (str,), "the name of an adapter, as a string"

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if value not in reading.terms.loras:
            listed = ", ".join(f"'{one}'" for one in reading.terms.loras) or "none"
            raise ModelNotFound(f"There is no adapter '{value[:200]}' here. Loaded: {listed}.", param=path)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "enum": list(terms.loras)} if terms.loras else {"type": "string"}


def resolve_lora(model: str, adapter: str | None, terms: Terms) -> LoraRef | None:
    """What a request with these goes through. Raises BadRequest where they name two."""
    named = adapter_named_in(model, terms)
    if named is not None and adapter is not None and named != adapter:
        raise BadRequest(f"model names the adapter {named!r}, and adapter another: choose one.", param="adapter")
    chosen = adapter or named or terms.default_lora
    return None if chosen is None else terms.loras.get(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLoraBody:
    lora_name: str = requires(Text(200, least=1), "What to call the adapter.")
    lora_path: str = requires(Text(4096, least=1), "Its folder on the server's machine.")
    load_inplace: None = refuses("is not supported: unload it first.", False)
    is_3d_lora_weight: None = refuses("is not supported: experts are not adapted.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLoraBody:
    lora_name: str = requires(Text(200, least=1), "The adapter's name.")


LOAD_LORA_BODY: Final = ObjectOf(LoadLoraBody)
UNLOAD_LORA_BODY: Final = ObjectOf(UnloadLoraBody)


class LoraChanged(Struct, kw_only=True):
    id: str
    object: Literal["lora_adapter"] = "lora_adapter"
    status: Literal["loaded", "unloaded"]
    parent: str
    rank: int | UnsetType = UNSET
    ingot: IgnoredNote | UnsetType = UNSET


def read_load_lora(
    value: Any, served: ServedModel, names: Sequence[str] = ()
) -> tuple[LoadLoraBody, IgnoredNote | UnsetType]:
    """`names` are those of other models and their adapters."""
    reading = served.reading()
    body: LoadLoraBody = LOAD_LORA_BODY.parse(value, "", reading)
    if not is_lora_name(body.lora_name) or body.lora_name in (*served.terms.all_model_names, *names):
        raise AdapterError(f"'{body.lora_name}' cannot be an adapter's name, or is in use.", param="lora_name")
    return body, IgnoredNote.of(reading)


def read_unload_lora(value: Any, served: ServedModel) -> tuple[UnloadLoraBody, IgnoredNote | UnsetType]:
    reading = served.reading()
    body: UnloadLoraBody = UNLOAD_LORA_BODY.parse(value, "", reading)
    return body, IgnoredNote.of(reading)


def lora_info_metric(model: str, statuses: Sequence[RequestStatus], most: int) -> Metric:
    """As routers read it from vLLM: the value is the time."""
    running = sorted({status.adapter for status in statuses if status.adapter and status.phase != "queued"})
    waiting = sorted({status.adapter for status in statuses if status.adapter and status.phase == "queued"})
    labels = {
        "model_name": model,
        "max_lora": str(most),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }
    help = "Adapters that requests go through and wait for, and how many there may be; the value is the time."
    return Metric("vllm:lora_requests_info", "gauge", help, (MetricSample(round(time.time(), 3), labels),))
