"""Calls without their family's markers, as Qwen2.5-Coder and other small models write them, and what only looks so."""

from __future__ import annotations

from tests.text.tool_formats.wire import OSLO, PARIS, PING, Case, calls, says

PARIS_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
OSLO_JSON = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
INDENTED = '{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}'
PING_JSON = '{"name": "ping", "arguments": {}}'
FLY_JSON = '{"name": "fly", "arguments": {}}'

_CALLS = [
    (PARIS_JSON, [PARIS]),
    (f"{PARIS_JSON}\n", [PARIS]),
    (INDENTED, [PARIS]),
    (PARIS_JSON.replace("arguments", "parameters"), [PARIS]),
    ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
    ('{"type": "function", "name": "get_weather", "arguments": {"city": "Paris"}, "id": "1"}', [PARIS]),
    (f"{PARIS_JSON}\n{OSLO_JSON}", [PARIS, OSLO]),
    (f"{PARIS_JSON}\n\n{OSLO_JSON}\n", [PARIS, OSLO]),
    (f"[{PARIS_JSON}, {OSLO_JSON}]", [PARIS, OSLO]),
    (f"[\n  {PARIS_JSON},\n  {OSLO_JSON}\n]", [PARIS, OSLO]),
    (f"```json\n{PARIS_JSON}\n```", [PARIS]),
    (f"```\n{PARIS_JSON}\n```", [PARIS]),
    (f"```json\n{INDENTED}\n```\n", [PARIS]),
    (f"```json\n{PARIS_JSON}\n{OSLO_JSON}\n```", [PARIS, OSLO]),
    (f"```json\n[{PARIS_JSON}, {OSLO_JSON}]\n```", [PARIS, OSLO]),
    (f"```json\n{PARIS_JSON}\n```\n```json\n{OSLO_JSON}\n```", [PARIS, OSLO]),
    (f"```json {PARIS_JSON}```", [PARIS]),
    (f"```xml\n<tool_call>\n{PARIS_JSON}\n</tool_call>\n```", [PARIS]),
    (f"<tools>\n{PARIS_JSON}\n</tools>", [PARIS]),
    (f"<tools>\n{PARIS_JSON}\n{OSLO_JSON}\n</tools>", [PARIS, OSLO]),
    (f"<tools>[{PARIS_JSON}, {PING_JSON}]</tools>", [PARIS, PING]),
    (f"Let me look.\n\n```json\n{PARIS_JSON}\n```", [says("Let me look."), PARIS]),
    (f"Let me look:\n{PARIS_JSON}", [says("Let me look:"), PARIS]),
    (f"```python\nx = {{}}\n```\n{PARIS_JSON}", [says("```python\nx = {}\n```"), PARIS]),
    (f"```python\nx = {{}}\n```\n```json\n{PARIS_JSON}\n```", [says("```python\nx = {}\n```"), PARIS]),
    (f"```json\n{PARIS_JSON}\n```\nThat will tell.", [PARIS, says("That will tell.")]),
    (f"{PARIS_JSON}\nThat will tell.", [PARIS, says("That will tell.")]),
    # What comes behind the arguments is not waited for.
    (PARIS_JSON[:-1], [PARIS]),
    (f"```json\n{PARIS_JSON}", [PARIS]),
    (f"```json\n{PARIS_JSON}\n``", [PARIS]),
    (f"<tools>\n{PARIS_JSON}", [PARIS]),
]
_TEXTS = [
    '{"name": "get_weather", "arguments": {"city": "Pa',
    '{"name": "get_weather", "arguments": {"days": 1',
    '```json\n{"name": "get_weather", "arguments": {"city": "Pa',
    '```json\n[{"name": "get_weather", "arguments": {"city": "Pa',
    '<tools>\n{"name": "get_weather", "arguments": {"city": "Paris"',
    FLY_JSON,
    f"```json\n{FLY_JSON}\n```",
    "```json\n{}\n```\n",
    "```json\n[1, 2]\n```",
    f"<tools>\n{FLY_JSON}\n</tools>",
    f"Write {PARIS_JSON} to call it.",
    f"Write `{PARIS_JSON}`, or ```{PARIS_JSON}```.",
    f"```python\n{PARIS_JSON}\n```",
    f"```jsonc\n{PARIS_JSON}\n```",
    f"````markdown\n```json\n{PARIS_JSON}\n```\n````",
    f"```yaml\nname: x\n\n{PARIS_JSON}\n```\nDone.",
    '{"name": "get_weather"}',
    '{"name": "get_weather", "arguments": "Paris"}',
    '{"name": "get_weather", "arguments": {"city": Paris}}',
    '```json\n{"name": "get_weather", "arguments": {"city": "Paris", oops}}\n```\nand more',
    '{"name": "get_weather", "arguments": {"city": "Paris"} oops',
    '{"name": "get_weather", "description": "Looks.", "parameters": {"type": "object"}}',
    '{"name": "Ada", "age": 36}',
    "[link](url), [1] and {braces}\n[2]: x\n{so}",
]

UNMARKED = [Case(name, text, means) for name in ("qwen", "hermes") for text, means in _CALLS]
UNMARKED += [Case(name, text, [says(text)]) for name in ("qwen", "hermes") for text in _TEXTS]
UNMARKED += [
    Case("llama", f"```json\n{PARIS_JSON}\n```", [PARIS]),
    Case("llama", f"Sure:\n```\n[{PARIS_JSON}]\n```", [says("Sure:"), PARIS]),
    Case("llama", f"```python\n{PARIS_JSON}\n```", [says(f"```python\n{PARIS_JSON}\n```")]),
    Case("xlam", f"{PARIS_JSON}, {OSLO_JSON}", [PARIS, OSLO]),
    Case("pythonic", '```python\n[get_weather(city="Paris")]\n```', [calls("get_weather", city="Paris")]),
    Case("pythonic", '```sh\n[get_weather(city="Paris")]\n```', [says('```sh\n[get_weather(city="Paris")]\n```')]),
]
