"""Loaded by schemathesis: which refusals of schema-valid bodies are right, as no JSON Schema can express the rule."""

from __future__ import annotations

from typing import Any

import schemathesis

from ingot.protocol.schema.bounds import IDENTIFIER_CHARS

SAID = (
    "must be at least n",  # best_of against n
    "cannot be streamed",  # best_of above n
    "one request may have",  # prompts times answers
    "needs the last message to be an assistant's",  # continue_final_message
    "tokens, and the model reads",  # what a tokenizer makes of a text
    "takes none, as it is a cross-encoder",  # instruction
    "unknown fields",  # over all objects of a body
    "did you mean",
    "requires a call, but there are no",  # tool_choice against tools
    "which is not a tool",
    "a tool's name has",
    "two tools named",
    "the parameters of a tool are an object",
    "cannot be combined with",  # a form of the answer against tools
    "Set the format of the answer exactly once",  # response_format against structured_outputs
    "set the same option",  # and differ
    "is run on text alone",  # a picture, by its place in the conversation
    "takes no audio",  # likewise
    "this server fetches nothing",
    "this server stores no files",
    "a data URL",  # what a text holds
    "no base64",
    "the file is no",
    "is the older name of",  # one thing by both its names
    "no tool_use before it has the id",  # a result against the calls before it
    "no unanswered call before it",
    "There is no stored response",  # what was stored before
    "there is no stored item",
    "input is empty",  # items that say nothing
    "no MCP server of that name",
    "no tools of the MCP server",
    "no archive of kept prefixes",  # a file of any bytes
    "the model's context is",  # what a tokenizer makes of messages and tools
    "input is not supported here",  # a picture, by whose message it is in
    "cannot fill in the middle",  # what a vocabulary names
    "needs stream to be true",  # of a query, whose fields are described one by one
    "specprefill is false: choose one",  # a share against what it is a share of
    "the prompt is empty",  # what a template makes of messages that say nothing
)


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """An explanation takes the body of any protocol. All of them at once are more than schemathesis can tell apart, and
    each is examined where it belongs: here a chat and a completion stand for them."""
    explained = raw_schema["paths"].get("/v1/cache/explain")
    if explained is not None:
        content = explained["post"]["requestBody"]["content"]["application/json"]
        content["schema"] = {"anyOf": content["schema"]["anyOf"][0:4:3]}


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether `failure` counts."""
    if response.status_code != 400 or "rejected" not in failure.title.lower():
        return True
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    return not any(words in message for words in SAID)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """What no stored response can be, given by chance, would keep every other field from being looked at."""
    given = body.get("previous_response_id") if isinstance(body, dict) else None
    if isinstance(given, str) and len(given) <= IDENTIFIER_CHARS:
        return {name: value for name, value in body.items() if name != "previous_response_id"} | {
            "input": body.get("input") or "Hi"
        }
    return body
