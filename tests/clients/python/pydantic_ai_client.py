"""Drives a running server with Pydantic AI and prints what came of it, as JSON. Usage: pydantic_ai_client.py URL KEY"""

import sys
from typing import Any

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from reporting import report

url, key = sys.argv[1:]
OPENAI = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
CHAT = OpenAIChatModel("default", provider=OPENAI)
RESPONSES = OpenAIResponsesModel("default", provider=OPENAI)
CLIENT = AsyncAnthropic(base_url=url, api_key=key)
MESSAGES = AnthropicModel("default", provider=AnthropicProvider(anthropic_client=CLIENT))


class Person(BaseModel):
    name: str
    age: int


def talked(model: Any) -> dict[str, Any]:
    """A run whose tool is called in between."""
    cities = []
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"18 degrees in {city}"

    made = agent.run_sync("What is the weather?")
    usage = made.usage() if callable(made.usage) else made.usage
    return {"cities": cities, "text": made.output, "cached": usage.cache_read_tokens / usage.input_tokens}


def held(model: Any) -> dict[str, Any]:
    made = Agent(model, output_type=NativeOutput(Person)).run_sync("a person").output
    return {"name": made.name, "age": made.age}


report(
    {
        "chat": lambda: talked(CHAT),
        "responses": lambda: talked(RESPONSES),
        "messages": lambda: talked(MESSAGES),
        "schema": lambda: held(CHAT),
        "schema_responses": lambda: held(RESPONSES),
    }
)
