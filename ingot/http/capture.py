"""Requests written down as they came and went, so that each can be run again: `--capture` and `ingot replay`.

All of them are, or only those that ask for it with the header `ingot-capture: on` (`--capture-requests asked`).
A file holds the body without what is secret in it, the seed that was drawn where it named none, the settings that
answers depend on, a digest of the prompt's tokens, the answers' tokens and texts, and how long everything took. Headers
are in none, and so no keys.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from ingot.config import SETTINGS, Settings
from ingot.engine.request import (
    Ended,
    Event,
    Failed,
    PoolingModelCard,
    PoolingOutput,
    PoolingRequest,
    Request,
    SequenceEnded,
    TextDelta,
)
from ingot.errors import BadRequest
from ingot.observe.logs import RareWarning
from ingot.protocol.served import ServedModel
from ingot.shares import heaviest_holder
from ingot.version import __version__

CAPTURE_VERSION: Final = 1
MOST_CAPTURES: Final = 1000  # files; the oldest go first, of the tenant that has most
EARLIER_SERVERS: Final = "\0"
SECRET_FIELDS: Final = frozenset({"authorization", "api_key", "apikey", "headers", "token", "password", "secret"})
REMOVED_SECRET: Final = "[removed]"
CAPTURE_HEADER: Final = "ingot-capture"
MOST_NUMBERS: Final = 1 << 18  # of vectors and scores, in a file; the rest is left out
ANSWER_SECTIONS: Final = frozenset({"the model", "further models", "the engine"})
"""Sections of the settings that what is answered may depend on."""

log = logging.getLogger("ingot.http")


class CaptureFolder:
    """The folder. For the event loop; a thread of its own writes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings_of_answers(settings)
        self._all = settings.capture_requests == "all"
        self._writer = ThreadPoolExecutor(1, "capture")
        self._write_failure_notice = RareWarning(log)
        self._tenants: dict[str, str] = {}  # whose a file is, by its name, where this server wrote it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def wants(self, asked: str | None) -> bool:
        """Whether a request is captured; `asked` is what its header says."""
        return self._all or asked is not None

    def begin(self, body: bytes, request: Request, served: ServedModel) -> RequestCapture:
        card = served.card
        model = {"name": card.name, "source": card.source, "device": card.device, "formats": card.formats}
        about = {"model": model, "fingerprint": served.fingerprint, "seed": request.sampling.seed}
        return RequestCapture(
            self, self._record(request.id, request.via, body, request.prompts) | about, request.tenant
        )

    def encoded(
        self, body: bytes, path: str, request: PoolingRequest, card: PoolingModelCard, answer: PoolingOutput
    ) -> None:
        """Write down a request for vectors or scores, which has its answer."""
        model = {"name": card.name, "source": card.source, "formats": card.dtype}
        fingerprint = digest_of((card.name, card.family, card.dimension, card.dtype))
        kept = answer.rows[: max(1, MOST_NUMBERS // max(1, card.dimension))]
        self.write(
            {
                **self._record(request.id, path, body, [piece.tokens for piece in request.inputs]),
                "model": model,
                "fingerprint": fingerprint,
                "answers": [{"numbers": list(row)} for row in kept],
                "timing_s": {"queue": answer.queue_s, "compute": answer.compute_s},
            },
            request.tenant,
        )

    def _record(self, id: str, path: str, body: bytes, prompts: Iterable[Sequence[int]]) -> dict[str, Any]:
        return {
            "version": CAPTURE_VERSION,
            "ingot": __version__,
            "id": id,
            "path": path,
            "captured_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "settings": self._settings,
            "body": without_secrets(json.loads(body)),
            "prompts": [{"tokens": len(prompt), "digest": digest_of(prompt)} for prompt in prompts],
        }

    def write(self, record: Mapping[str, Any], tenant: str) -> None:
        self._writer.submit(self._write, record, tenant)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _write(self, record: Mapping[str, Any], tenant: str) -> None:
        try:
            path = self._folder / f"{record['id']}.json"
            path.touch(0o600)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
            self._tenants[path.name] = tenant
            self._remove_old()
        except OSError as error:
            self._write_failure_notice.warn("a request was not captured in %s: %s", self._folder, error.strerror)

    def _remove_old(self) -> None:
        """What earlier servers left is of one holder."""
        written = sorted(self._folder.glob("*.json"), key=lambda one: one.stat().st_mtime)
        self._tenants = {one.name: self._tenants.get(one.name, EARLIER_SERVERS) for one in written}
        held = Counter(self._tenants.values())
        while held.total() > MOST_CAPTURES:
            giver = heaviest_holder(held)
            oldest = next(one for one in written if self._tenants.get(one.name) == giver)
            oldest.unlink()
            del self._tenants[oldest.name]
            held[giver] -= 1


class RequestCapture:
    """One request. Takes all its events; the last one writes it down."""

    def __init__(self, captures: CaptureFolder, record: dict[str, Any], tenant: str) -> None:
        self._captures, self._record, self._tenant = captures, record, tenant
        self._texts: dict[int, list[str]] = {}
        self._ended: list[SequenceEnded] = []

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self._texts.setdefault(event.index, []).append(event.text)
            elif isinstance(event, SequenceEnded):
                self._ended.append(event)

    def end(self, last: Ended | Failed) -> None:
        told: dict[str, Any] = {"usage": asdict(last.usage)}
        if isinstance(last, Failed):
            told["error"] = {"code": last.error.code, "message": last.error.message}
        else:
            told["timing_s"] = asdict(last.timing)
            told["cached_tokens"] = sum(report.matched for report in last.cache)
        answers = [
            {
                "reason": ended.reason,
                "tokens": list(ended.tokens),
                "text": "".join(self._texts.get(ended.index, ())),
            }
            for ended in sorted(self._ended, key=lambda one: one.index)
        ]
        self._captures.write({**self._record, "answers": answers, **told}, self._tenant)


def wants_capture(captures: CaptureFolder | None, scope: Scope) -> bool:
    """Whether a request is to be written down. Raises BadRequest where it asks for what cannot be had."""
    asked = Headers(scope=scope).get(CAPTURE_HEADER)
    if asked is not None and asked.lower() != "on":
        raise BadRequest(f"{CAPTURE_HEADER} may be 'on', and nothing else.", param=CAPTURE_HEADER)
    if asked is not None and captures is None:
        raise BadRequest(f"{CAPTURE_HEADER}: this server has no --capture folder to write to.", param=CAPTURE_HEADER)
    return captures is not None and captures.wants(asked)


def with_seed(request: Request) -> Request:
    """The same request with a seed, so that it can be run again."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=random.getrandbits(53)))


def digest_of(tokens: Iterable[object]) -> str:
    return blake2b(" ".join(map(str, tokens)).encode(), digest_size=16).hexdigest()


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: REMOVED_SECRET if k.lower() in SECRET_FIELDS else without_secrets(each) for k, each in value.items()}
    if isinstance(value, list):
        return [without_secrets(each) for each in value]
    return value


def settings_of_answers(settings: Settings) -> dict[str, Any]:
    """Those that are not the defaults, as JSON."""
    given = {
        known.name: getattr(settings, known.name)
        for known in SETTINGS.values()
        if known.section in ANSWER_SECTIONS and not known.secret
    }
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value != (default.expanduser() if isinstance(default := SETTINGS[name].default, Path) else default)
    }
