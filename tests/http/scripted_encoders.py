"""The scripted engine with encoders that count: a row is the number of tokens, their sum, and so on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ingot.engine.request import PoolingOutput, PoolingRequest
from tests.encoders import offered, row_of
from tests.http.scripted import ScriptedEngine


class EncodingEngine(ScriptedEngine):
    """`held` makes encodings wait for ever; `left` says that the one who waited has gone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoders = {"embedding": offered("embedding"), "rerank": offered("rerank")}
        self.encodings: list[PoolingRequest] = []
        self.held = False
        self.left = threading.Event()

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        if self.refusal is not None:
            raise self.refusal
        self.encodings.append(request)
        self.opened.set()
        try:
            if self.held:
                await asyncio.Event().wait()
        finally:
            self.left.set()
        rows = tuple(row_of(piece.tokens, piece.types) for piece in request.inputs)
        return PoolingOutput(rows, request.tokens, 0.1, 0.2)
