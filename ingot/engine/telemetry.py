"""The log's lines on each request: that it began, how far its prompt is, and how it ended.

They hold numbers and ids alone: nothing of what was asked or answered, nor whose key it was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ingot.errors import Cancelled, ClientLeft, IngotError, Stopping
from ingot.observe.logs import about

if TYPE_CHECKING:
    from ingot.engine.request import RequestStatus
    from ingot.engine.scheduler import StepPlan

PROGRESS_S: Final = 10.0
"""How often a prompt that takes long is told of."""
SLOW_STEP_S: Final = 2.0
"""A step that takes longer than this is worth a line in the log."""
NAMED: Final = 4  # requests of such a step

log = logging.getLogger("ingot.requests")


@dataclass(slots=True)
class Watched:
    """What was last told of a request, and when."""

    at: float
    prefilled: int


class Journal:
    """For one thread, which says what time it is."""

    def __init__(self, model: str, every_s: float = PROGRESS_S) -> None:
        self._model, self._every_s = model, every_s
        self._watched: dict[str, Watched] = {}

    def began(self, status: RequestStatus, via: str, now: float) -> None:
        """It runs for the first time; said once. `via` is the address that it came to."""
        if status.id in self._watched:
            return
        self._watched[status.id] = Watched(now, status.cached_tokens)
        log.info(
            "%s began: %s, model %s, %d prompt tokens, %d of them cached",
            *(status.id, via or "no client", self._model, status.prompt_tokens, status.cached_tokens),
            extra=_facts(status, "began", path=via, model=self._model),
        )

    def look(self, now: float, statuses: Callable[[], Iterable[RequestStatus]]) -> None:
        """Tells of the prompts that are due. Cheap where none is, as it is called between all steps."""
        if not any(now - watched.at >= self._every_s for watched in self._watched.values()):
            return
        for status in statuses():
            watched = self._watched.get(status.id)
            if watched is None or now - watched.at < self._every_s:
                continue
            if status.phase == "decode":
                watched.at = math.inf
                continue
            if status.phase == "prefill":
                _tell_progress(status, watched, now)
            watched.at, watched.prefilled = now, status.prefilled_tokens

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long. Said where that was too long, with whose it was."""
        if seconds <= SLOW_STEP_S:
            return
        prompt = sum(chunk.count for chunk in plan.chunks)
        rows = [*(chunk.sequence for chunk in plan.chunks), *plan.decode]
        ids = list(dict.fromkeys(row.request.id for row in rows))
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        log.warning(
            "a step took %.1f s: %d rows decoding, %d prompt tokens of %d sequences, %d joined, %d preempted; of %s%s",
            *(seconds, len(plan.decode), prompt, len(plan.chunks), len(plan.admitted), len(plan.preempted)),
            *(", ".join(ids[:NAMED]), more),
            extra={"facts": {"event": "slow_step", "took_s": round(seconds, 3), "request_ids": ids}},
        )

    def ended(self, status: RequestStatus, outcome: str) -> None:
        self._watched.pop(status.id, None)
        told = _facts(status, "ended", outcome=outcome)
        log.info("%s ended, %s: %s", status.id, outcome, ", ".join(_spent(status)), extra=told)


def outcome_of(error: IngotError) -> str:
    """How a request ended that did not come to its end."""
    if isinstance(error, ClientLeft):
        return f"the client left ({error.status})"
    if isinstance(error, Stopping):
        return f"cut off, as the server stops ({error.status})"
    return f"{'cancelled' if isinstance(error, Cancelled) else 'failed'} ({error.status} {error.code})"


def _tell_progress(status: RequestStatus, watched: Watched, now: float) -> None:
    speed = (status.prefilled_tokens - watched.prefilled) / (now - watched.at)
    left = status.prompt_tokens - status.prefilled_tokens
    estimate = f"about {left / speed:.0f} s left" if speed > 0 else "no telling how long"
    log.info(
        "%s prompt: %d of %d tokens, %.1f tokens/s, %s",
        *(status.id, status.prefilled_tokens, status.prompt_tokens, max(speed, 0.0), estimate),
        extra=_facts(status, "prefill"),
    )


def _facts(status: RequestStatus, event: str, **more: object) -> dict[str, Any]:
    """What a line says of a request, for machines."""
    return about(
        status.id,
        event=event,
        prompt_tokens=status.prompt_tokens,
        cached_tokens=status.cached_tokens,
        prefilled_tokens=status.prefilled_tokens,
        completion_tokens=status.completion_tokens,
        preemptions=status.preemptions,
        age_s=round(status.age_s, 3),
        first_token_s=None if status.first_token_s is None else round(status.first_token_s, 4),
        **more,
    )


def _spent(status: RequestStatus) -> Iterable[str]:
    share = status.cached_tokens / status.prompt_tokens if status.prompt_tokens else 0.0
    yield f"{status.prompt_tokens} prompt tokens ({share:.0%} cached)"
    if status.first_token_s is None:
        yield f"{status.prefilled_tokens} of them computed or cached, no token after {status.age_s:.2f} s"
        return
    yield f"first token after {status.first_token_s:.2f} s"
    yield f"{status.completion_tokens} answer tokens"
    seconds = status.age_s - status.first_token_s
    if status.completion_tokens > 1 and seconds > 0:
        yield f"{(status.completion_tokens - 1) / seconds:.1f} tokens/s"
