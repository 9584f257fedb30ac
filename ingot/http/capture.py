"""Captures requests and answers in files, so that they can be replayed: `--capture` and `ingot replay`.

All requests are captured, or only those with the header `ingot-capture: on` (`--capture-requests asked`). A file has
the body without secrets, the seed that was used, the settings that answers depend on, a digest of the prompt's tokens,
the answers' tokens and texts, and timings. It has no headers, and so no keys.
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
MOST_CAPTURES: Final = 1000  # files; beyond that, the oldest of the tenant with most are deleted
EARLIER_SERVERS: Final = "\0"
SECRET_FIELDS: Final = frozenset({"authorization", "api_key", "apikey", "headers", "token", "password", "secret"})
REMOVED_SECRET: Final = "[removed]"
CAPTURE_HEADER: Final = "ingot-capture"
MOST_NUMBERS: Final = 1 << 18  # of embeddings and scores, in one file; the rest is left out
ANSWER_SECTIONS: Final = frozenset({"the model", "additional models", "the engine"})
"""Sections of the settings that answers may depend on."""

log = logging.getLogger("ingot.http")


class CaptureFolder:
    """Used by the event loop; a thread of its own writes the files."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings_of_answers(settings)
        self._all = settings.capture_requests == "all"
        self._writer = ThreadPoolExecutor(1, "capture")
        self._write_failure_notice = RareWarning(log)
        self._tenants: dict[str, str] = {}  # of the files that this server wrote, by name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def wants(self, header: str | None) -> bool:
        """Whether a request is captured; `header` is its `ingot-capture`."""
        return self._all or header is not None

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
        """Capture a request for embeddings or scores, with its answer."""
        model = {"name": card.name, "source": card.source, "formats": card.dtype}
        fingerprint = digest_of((card.name, card.family, card.dimension, card.dtype))
        rows = answer.rows[: max(1, MOST_NUMBERS // max(1, card.dimension))]
        self.write(
            {
                **self._record(request.id, path, body, [piece.tokens for piece in request.inputs]),
                "model": model,
                "fingerprint": fingerprint,
                "answers": [{"numbers": list(row)} for row in rows],
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
        """Delete files beyond the limit. Those of earlier servers count as one tenant's."""
        written = sorted(self._folder.glob("*.json"), key=lambda one: one.stat().st_mtime)
        self._tenants = {one.name: self._tenants.get(one.name, EARLIER_SERVERS) for one in written}
        counts = Counter(self._tenants.values())
        while counts.total() > MOST_CAPTURES:
            tenant = heaviest_holder(counts)
            oldest = next(one for one in written if self._tenants.get(one.name) == tenant)
            oldest.unlink()
            del self._tenants[oldest.name]
            counts[tenant] -= 1


class RequestCapture:
    """One request. Takes all its events; `end` writes the file."""

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
        summary: dict[str, Any] = {"usage": asdict(last.usage)}
        if isinstance(last, Failed):
            summary["error"] = {"code": last.error.code, "message": last.error.message}
        else:
            summary["timing_s"] = asdict(last.timing)
            summary["cached_tokens"] = sum(report.matched for report in last.cache)
            summary["thinned_out"] = any(report.lossy for report in last.specprefill)
        answers = [
            {
                "reason": ended.reason,
                "tokens": list(ended.tokens),
                "text": "".join(self._texts.get(ended.index, ())),
            }
            for ended in sorted(self._ended, key=lambda one: one.index)
        ]
        self._captures.write({**self._record, "answers": answers, **summary}, self._tenant)


def wants_capture(captures: CaptureFolder | None, scope: Scope) -> bool:
    """Whether a request is to be captured. Raises BadRequest where its header cannot be honoured."""
    header = Headers(scope=scope).get(CAPTURE_HEADER)
    if header is not None and header.lower() != "on":
        raise BadRequest(f"{CAPTURE_HEADER} may only be 'on'.", param=CAPTURE_HEADER)
    if header is not None and captures is None:
        raise BadRequest(f"{CAPTURE_HEADER}: this server has no --capture folder to write to.", param=CAPTURE_HEADER)
    return captures is not None and captures.wants(header)


def with_seed(request: Request) -> Request:
    """The same request with a seed, so that it can be replayed."""
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
    """Those that differ from the defaults, as JSON."""
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        if setting.section in ANSWER_SECTIONS and not setting.secret:
            value, default = getattr(settings, setting.name), setting.default
            if value != (default.expanduser() if isinstance(default, Path) else default):
                found[setting.name] = str(value) if isinstance(value, Path) else value
    return found
