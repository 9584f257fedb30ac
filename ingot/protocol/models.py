"""`GET /v1/models`: what is served, and under which names."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ingot.protocol.fields import unknown_model
from ingot.protocol.served import Served


class ModelBody(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ingot"] = "ingot"
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]


def list_models(served: Served) -> ModelList:
    return ModelList(data=[model_body(served)])


def retrieve_model(name: str, served: Served) -> ModelBody:
    """The model served as `name`, under its own name."""
    if name not in served.terms.models:
        raise unknown_model(name, served.terms)
    return model_body(served)


def model_body(served: Served) -> ModelBody:
    card = served.card
    return ModelBody(id=card.name, created=card.created, max_model_len=card.context)
