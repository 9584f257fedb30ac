"""What spans tell of requests, by the names of OpenTelemetry's conventions for generative AI, and vLLM's for what these
have none for. Nothing of what was asked or answered is in one."""

from __future__ import annotations

from typing import Any, Final

from ingot.engine.encoder_request import Encoded
from ingot.engine.request import Ended, Failed, Request, Sampling
from ingot.engine.speaking.request import SpeechEnded
from ingot.engine.speech_request import Transcribed
from ingot.http.edge import Reply
from ingot.http.traces import TracedRequest
from ingot.observe.recent_requests import Span

COMPLETIONS: Final = frozenset({"/v1/completions", "/api/generate"})
OUTPUTS: Final = {"transcription": "text", "speech": "speech"}
"""What comes of an operation, where the conventions have a word for it."""


def generation_span(
    model: str, request: Request, last: Ended | Failed, reasons: tuple[str, ...], span: Span
) -> TracedRequest:
    """Of a request that ended just now."""
    operation = "text_completion" if request.via in COMPLETIONS else "chat"
    events = {"prompt": span.queued_s}
    if last.usage.completion_tokens:
        events["first_token"] = span.queued_s + span.prompt_s
    return TracedRequest(
        f"{operation} {model}",
        {**_common(operation, model, request.id, request.via), **_generated(request, last, reasons, span)},
        span.took_s,
        events,
        last.error.code if isinstance(last, Failed) else None,
    )


def side_span(
    model: str,
    operation: str,
    answer: Reply,
    last: Encoded | Transcribed | SpeechEnded | None,
    took_s: float,
    fault: str | None,
) -> TracedRequest:
    """Of a request that ended just now, for a model that does not generate. `last` says how it went, where it came to
    its end; `fault` is what it ended in otherwise."""
    found = {**_common(operation, model, answer.id, answer.scope["path"]), "gen_ai.latency.e2e": took_s}
    if operation in OUTPUTS:
        found["gen_ai.output.type"] = OUTPUTS[operation]
    if last is not None:
        found["gen_ai.latency.time_in_queue"] = last.queue_s
        found["gen_ai.latency.time_in_model_inference"] = last.compute_s
    if isinstance(last, Encoded):
        found["gen_ai.usage.input_tokens"] = last.tokens
    if isinstance(last, Transcribed):
        found["gen_ai.usage.output_tokens"] = last.tokens
    if fault is not None:
        found["error.type"] = fault
    return TracedRequest(f"{operation} {model}", found, took_s, {}, fault)


def _common(operation: str, model: str, request_id: str, path: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ingot",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.request.id": request_id,
        "url.path": path,
    }


def _generated(request: Request, last: Ended | Failed, reasons: tuple[str, ...], span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_asked(request.sampling),
        "gen_ai.usage.input_tokens": last.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": last.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": last.usage.cached_tokens,
        "gen_ai.latency.time_in_queue": span.queued_s,
        "gen_ai.latency.time_in_model_prefill": span.prompt_s,
        "gen_ai.latency.time_in_model_decode": span.answer_s,
        "gen_ai.latency.e2e": span.took_s,
    }
    if request.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    if request.n != 1:
        found["gen_ai.request.choice.count"] = request.n
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    if last.usage.completion_tokens:
        found["gen_ai.latency.time_to_first_token"] = span.queued_s + span.prompt_s
    if isinstance(last, Failed):
        found["error.type"] = last.error.code
    return found


def _asked(sampling: Sampling) -> dict[str, Any]:
    """How tokens were to be chosen."""
    found: dict[str, Any] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    return found
