"""`POST /v1/responses`: what a body asks for, in the light of what went before it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET

from ingot.engine.request import Sampling
from ingot.errors import BadRequest, Unsupported
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Note
from ingot.protocol.chat.ask import Ask, FieldNames, Tool, ToolChoice
from ingot.protocol.chat.preparation import Prepared, prepare_ask
from ingot.protocol.chat.receipts import Source
from ingot.protocol.responses.answers import ReasoningEcho, ResponseBody, ResponseTokens, TextEcho
from ingot.protocol.responses.body import RESPONSES_BODY, SEALED, ResponsesBody
from ingot.protocol.responses.conversation import InputConversation
from ingot.protocol.responses.input_items import ITEMS
from ingot.protocol.responses.output import item_id, response_of
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.responses.stream import ResponseBuilder, ResponseOptions
from ingot.protocol.responses.tools import RemoteTools, Toolbox
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import Served

NAMES: Final = FieldNames(messages="input", output="text.format", thinking="reasoning")
STATED: Final = frozenset(
    {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
)
UNNAMED: Final = "resp_" + "0" * 24  # of a response that is not made
ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_list_tools": "mcpl",
}


class PreviousNotFound(BadRequest):
    code = "previous_response_not_found"


class Past(Protocol):
    """The stored responses of one tenant."""

    def find(self, response_id: str) -> StoredResponse | None: ...

    def check(self) -> None:
        """Raises Unavailable where nothing can be stored."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a body is read in the light of, besides the served model: the asking tenant's, and the server's."""

    past: Past | None  # None: responses are not kept here
    remote: RemoteTools


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A body, read. `first` is what the engine is to do; where the server makes calls, `go_on` says what next."""

    body: ResponsesBody
    served: Served
    composer: ResponseBuilder
    first: GenerationTask
    items: list[dict[str, Any]]  # what the response answers, to be kept with it
    store: bool

    def go_on(self) -> GenerationTask | None:
        """After the calls were made; None where no more may be generated. Not for an event loop."""
        spent = self.composer.spent.usage.completion_tokens
        limit = self.body.max_output_tokens
        if limit is not None and spent >= limit:
            return None
        output = msgspec.to_builtins(self.composer.snapshot().output)
        shown, choice = self.composer.toolbox.chosen(self.body.tool_choice)
        # A call that was forced has been made: forcing it again would never come to an answer.
        further: tuple[tuple[Tool, ...], ToolChoice] = shown, "none" if choice == "none" else "auto"
        wanted = wanted_of(self.body, self.served, further, [*self.items, *output])
        request = replace(
            self.first.request,
            prompts=(wanted.prompt,),
            reading=wanted.reading,
            guide=wanted.guide,
            marks=wanted.marks,
            media=wanted.media,
            sparse=self.body.sparse(wanted.sources),
            max_tokens=None if limit is None else limit - spent,
        )
        self.composer.head = replace(self.composer.head, source=Source.of(self.served, wanted.sources))
        return replace(self.first, request=request, head=self.composer.head, turn=wanted.turn)


def read_response(value: Any, served: Served, request_id: str, around: Surroundings) -> ResponsePlan:
    """The plan that a decoded body asks for. Renders and looks things up: not for an event loop."""
    reading = served.reading()
    body: ResponsesBody = RESPONSES_BODY.parse(value, "", reading)
    store = is_kept(body, around)
    toolbox = Toolbox(body.tools, around.remote)
    note_left_out(toolbox, reading)
    items = items_of(value, around, request_id)
    wanted = wanted_of(body, served, toolbox.chosen(body.tool_choice), items)
    reading.ignored.extend(wanted.ignored)
    request = body.request(
        request_id,
        served,
        [wanted],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(served, logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None),
        stop=body.stopping(body.stop),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, wanted.sources, request)
    telling = ResponseOptions(
        summary=body.summary is not None,
        seal=served.seal if SEALED in body.include else None,
        logprobs=body.wants_logprobs,
        kept=request.cache,
    )
    composer = ResponseBuilder(head, echo(value, body, head, request.sampling, store=store), toolbox, telling)
    return ResponsePlan(
        body, served, composer, GenerationTask(request, composer, "input", head, wanted.turn), items, store
    )


def count_tokens(value: Any, served: Served, around: Surroundings) -> ResponseTokens:
    """How long the prompt would be, exactly."""
    plan = read_response(value, served, UNNAMED, around)
    ignored = plan.composer.head.ignored
    return ResponseTokens(len(plan.first.request.prompts[0]), ingot=Note(ignored) if ignored else UNSET)


def is_kept(body: ResponsesBody, around: Surroundings) -> bool:
    """Whether the response is to be stored."""
    if around.past is not None:
        if body.store is not False:
            around.past.check()
        return body.store is not False
    for name, asks in (("store", body.store), ("background", body.background)):
        if asks:
            raise Unsupported(
                f"{name} is not supported: this server was started without a store of responses.", param=name
            )
    return False


def note_left_out(toolbox: Toolbox, reading: BodyReading) -> None:
    if toolbox.left_out and reading.terms.strict:
        raise Unsupported(f"{toolbox.left_out[0]} has no effect here, and this server is strict.", param="tools")
    reading.ignored.extend(dict.fromkeys(toolbox.left_out))


def items_of(value: Mapping[str, Any], around: Surroundings, request_id: str) -> list[dict[str, Any]]:
    """All items that the response answers, the stored ones first, each with a type and an id."""
    given = value.get("input")
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    past = [] if value.get("previous_response_id") is None else gone_before(value["previous_response_id"], around)
    return past + [referred(item, around, at) or complete(item, request_id, at) for at, item in enumerate(own)]


def gone_before(response_id: str, around: Surroundings) -> list[dict[str, Any]]:
    kept = None if around.past is None else around.past.find(response_id)
    if kept is None:
        raise PreviousNotFound(f"There is no stored response '{response_id[:100]}'.", param="previous_response_id")
    if kept.response["status"] in ("queued", "in_progress"):
        raise BadRequest(f"The response '{response_id}' has not ended yet.", param="previous_response_id")
    return kept.conversation


def referred(item: dict[str, Any], around: Surroundings, at: int) -> dict[str, Any] | None:
    """The stored item that `item` refers to, or None where it is no reference."""
    if item.get("type") not in (None, "item_reference") or "role" in item:
        return None
    response_id = response_of(item["id"])
    kept = around.past.find(response_id) if around.past is not None and response_id is not None else None
    found = [] if kept is None else [each for each in kept.conversation if each.get("id") == item["id"]]
    if not found:
        param = f"input.{at}.id"
        raise BadRequest(f"{param}: there is no stored item '{item['id'][:100]}'.", param=param)
    return found[0]


def complete(item: dict[str, Any], request_id: str, at: int) -> dict[str, Any]:
    """`item` as lists of items show it."""
    made = {"id": None, **item, "type": item.get("type") or "message"}
    if made["id"] is None:
        made["id"] = item_id(ID_PREFIXES.get(made["type"], "item"), request_id, f"in{at}")
    if made["type"] in STATED and made.get("status") is None:
        made["status"] = "completed"
    if made["type"] == "message" and isinstance(made["content"], str):
        kind = {"type": "output_text", "annotations": []} if made["role"] == "assistant" else {"type": "input_text"}
        made["content"] = [kind | {"text": made["content"]}]
    return made


def wanted_of(
    body: ResponsesBody, served: Served, tools: tuple[tuple[Tool, ...], ToolChoice], items: list[dict[str, Any]]
) -> Prepared:
    conversation = InputConversation(served.seal)
    # The client's own items were read already; these are read quietly, for what they say.
    for at, item in enumerate(ITEMS.parse(items, "input", BodyReading(replace(served.terms, strict=False)))):
        conversation.add(item, f"input.{at}")
    said = conversation.finish()
    if body.instructions is not None:
        said = [{"role": "system", "content": body.instructions}, *said]
    if not said:
        raise BadRequest("input is empty: there is nothing to answer.", param="input")
    shown, choice = tools
    ask = Ask(
        messages=said,
        tools=shown,
        choice=choice,
        parallel=body.parallel_tool_calls,
        hold_calls=body.hold_calls,
        thinking=body.thinking,
        output=body.output,
        variables=body.chat_template_kwargs,
    )
    wanted = prepare_ask(served, body.remembering(ask), names=NAMES)
    return replace(wanted, ignored=(*wanted.ignored, *dict.fromkeys(conversation.left_out)))


def echo(
    value: Mapping[str, Any], body: ResponsesBody, head: AnswerHead, sampling: Sampling, *, store: bool
) -> ResponseBody:
    """The response before anything is in it: what was asked, given back."""
    text = value.get("text") or {}
    return ResponseBody(
        id=head.id,
        created_at=head.created,
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=head.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(None if body.reasoning is None else body.reasoning.effort, body.summary),
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=TextEcho(text.get("format") or {"type": "text"}),
        tool_choice=value.get("tool_choice") or "auto",
        tools=[dict(tool) for tool in value.get("tools") or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
