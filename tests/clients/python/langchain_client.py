"""Drives a running server with LangChain and prints what came of it, as JSON. Usage: langchain_client.py URL KEY"""

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from reporting import report

url, key = sys.argv[1:]


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def openai(**given: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", base_url=f"{url}/v1", api_key=key, max_retries=0, **given)


def anthropic() -> ChatAnthropic:
    return ChatAnthropic(model="default", base_url=url, api_key=key, max_retries=0, max_tokens=500)


def talked(model: Any) -> dict[str, Any]:
    """Two turns with a call between them."""
    bound = model.bind_tools([weather])
    said: list[Any] = [HumanMessage("What is the weather?")]
    first = bound.invoke(said)
    (call,) = first.tool_calls
    said += [first, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    second = bound.invoke(said)
    details = second.usage_metadata["input_token_details"]
    return {
        "city": call["args"]["city"],
        "text": second.text if isinstance(second.text, str) else second.text(),
        "cached": details["cache_read"] / first.usage_metadata["input_tokens"],
    }


def streamed(model: Any) -> dict[str, Any]:
    pieces = list(model.stream("Hi"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return {"text": whole.text if isinstance(whole.text, str) else whole.text(), "pieces": len(pieces)}


def held(model: Any) -> dict[str, Any]:
    made: Any = model.with_structured_output(Person, method="json_schema").invoke("a person")
    return {"name": made.name, "age": made.age}


report(
    {
        "chat": lambda: talked(openai()),
        "responses": lambda: talked(openai(use_responses_api=True)),
        "messages": lambda: talked(anthropic()),
        "stream": lambda: streamed(openai()),
        "stream_responses": lambda: streamed(openai(use_responses_api=True)),
        "stream_messages": lambda: streamed(anthropic()),
        "schema": lambda: held(openai()),
        "schema_responses": lambda: held(openai(use_responses_api=True)),
    }
)
