"""Scripted engines of encoders that count: a row is the number of tokens, their sum, and so on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ingot.engine.request import PoolingOutput, PoolingRequest
from tests.encoders import offered, row_of
from tests.http.scripted import ScriptedEngine, ScriptedTaskEngine


class ScriptedPoolingEngine(ScriptedTaskEngine):
    """`owner` says what is to happen, and is told what did."""

    def __init__(self, model: Any, owner: EncodingEngine | None = None) -> None:
        super().__init__(model)
        self.owner = owner or EncodingEngine()

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        if self.owner.refusal is not None:
            raise self.owner.refusal
        self.owner.encodings.append(request)
        self.owner.opened.set()
        try:
            if self.owner.held:
                await asyncio.Event().wait()
        finally:
            self.owner.left.set()
        rows = tuple(row_of(piece.tokens, piece.types) for piece in request.inputs)
        return PoolingOutput(rows, request.tokens, 0.1, 0.2)


class EncodingEngine(ScriptedEngine):
    """A model that generates, with an embedding model and a reranker alongside. `held` makes encodings wait for ever;
    `left` says that the one who waited has gone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.alongside = [
            ScriptedPoolingEngine(offered("embedding"), self),
            ScriptedPoolingEngine(offered("rerank"), self),
        ]
        self.encodings: list[PoolingRequest] = []
        self.held = False
        self.left = threading.Event()
