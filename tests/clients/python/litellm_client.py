"""Drives a running server with litellm and prints what came of it, as JSON. Usage: litellm_client.py URL KEY"""

import json
import sys
from typing import Any

import litellm
from reporting import report

url, key = sys.argv[1:]
litellm.suppress_debug_info = True
OPENAI = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": key}
ANTHROPIC = {"model": "anthropic/default", "api_base": url, "api_key": key}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def talked(**server: Any) -> dict[str, Any]:
    """Two turns with a call between them."""
    said: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    first = litellm.completion(messages=said, tools=TOOLS, max_tokens=500, **server)
    message = first.choices[0].message
    call = message.tool_calls[0]
    said += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    second = litellm.completion(messages=said, tools=TOOLS, max_tokens=500, **server)
    return {
        "finish": first.choices[0].finish_reason,
        "city": json.loads(call.function.arguments)["city"],
        "text": second.choices[0].message.content,
        "cached": second.usage.prompt_tokens_details.cached_tokens / first.usage.prompt_tokens,
    }


def streamed(**server: Any) -> dict[str, Any]:
    chunks = litellm.completion(messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=500, **server)
    return {"text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}


def responses() -> dict[str, Any]:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    first = litellm.responses(input="What is the weather?", tools=[tool], **OPENAI)
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    said = [*(item.model_dump(exclude_none=True) for item in first.output), output]
    second = litellm.responses(
        input=[{"role": "user", "content": "What is the weather?"}, *said], tools=[tool], **OPENAI
    )
    events = litellm.responses(input="Hi", stream=True, **OPENAI)
    kinds = [str(getattr(event.type, "value", event.type)) for event in events]
    text = "".join(part.text for item in second.output if item.type == "message" for part in item.content)
    return {"city": json.loads(call.arguments)["city"], "text": text, "last": kinds[-1]}


report(
    {
        "chat": lambda: talked(**OPENAI),
        "messages": lambda: talked(**ANTHROPIC),
        "stream": lambda: streamed(**OPENAI),
        "stream_messages": lambda: streamed(**ANTHROPIC),
        "responses": responses,
    }
)
