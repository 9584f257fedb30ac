"""What the endpoints of a model share that generates: its engine, what it serves, and what it remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio.to_thread

from ingot.config import Settings
from ingot.config.archive_key import ArchiveKey
from ingot.engine.model_card import ModelCard
from ingot.engine.request import Request
from ingot.http.shared_state import Hall
from ingot.http.side_service import SideService
from ingot.http.warming import warm, warm_requests
from ingot.protocol.served import Served
from ingot.text.prompt.answer_cache import AnswerFile, answers_path
from ingot.text.prompt.remembered import RememberedAnswers

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def nothing_to_end() -> None:
    """An engine that is alone stays."""


def identity_of(card: ModelCard) -> str:
    """Which model it is, whatever it is called here."""
    return "\n".join((card.source, card.family, card.dtype, str(card.weight_bytes)))


class Service(SideService):
    """`settings` are those of the model; with a hall of its own, the server's too."""

    engine: Engine
    served: Served

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        hall: Hall | None = None,
        extend: Callable[[], Callable[[], None]] = lambda: nothing_to_end,
    ) -> None:
        """`extend` keeps the engine for work that outlasts its request, until what it returns is called."""
        hearing = None if engine.hearing is None else engine.hearing.card
        served = Served.of(
            engine.card, engine.tokenizer, settings, engine.encoders, engine.processor, hearing, engine.speaking
        )
        super().__init__(engine, served, settings, hall or Hall(settings))
        self.extend = extend
        self._alone, self._own = hall is None, settings
        if not self._alone:
            self.served = replace(self.served, terms=replace(self.served.terms, unloads=True))
        self.look_at_loras()
        if self.response_store is not None:
            self.served = replace(self.served, secret=self.response_store.secret)
        self._answers = None
        if settings.cache_dir is not None:
            secret = ArchiveKey(settings.archive_key_file.expanduser()).secret()
            path = answers_path(settings.cache_dir, engine.tokenizer, identity_of(engine.card))
            self._answers = AnswerFile(path, secret)
            self.served = replace(self.served, answers=RememberedAnswers(journal=self._answers))
        self._to_warm: list[Request] = []
        if settings.warm_prompts is not None:
            self._to_warm = warm_requests(settings.warm_prompts, map(self.served_to, self.tenants.names))
        self._warming: asyncio.Task[None] | None = None

    def look_at_loras(self) -> None:
        """Serve the adapters that the engine has now."""
        self.served = self.served.with_loras(self.engine.loras, self._own.default_lora)

    async def start(self) -> None:
        """What needs the event loop or takes a while, before requests come. Raises ConfigError."""
        await anyio.to_thread.run_sync(self.served.grammars.prepare)
        if self._alone:
            await self.hall.start()

    def ready(self) -> None:
        """Requests may come: what is done while there are none begins."""
        if self._to_warm:
            self._warming = asyncio.create_task(warm(self.engine, self._to_warm))

    async def stop(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            with suppress(asyncio.CancelledError):
                await self._warming
        if self._alone:
            await self.hall.stop()
        self.served.grammars.close()
        await super().stop()
        if self._answers is not None:
            await anyio.to_thread.run_sync(self._answers.close)

    def served_to(self, tenant: str) -> Served:
        return replace(self.served, tenant=tenant) if tenant else self.served
