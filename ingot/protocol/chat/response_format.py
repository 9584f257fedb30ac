"""The forms that an answer can be held to, as OpenAI's and vLLM's chats describe them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.protocol.chat.ask import Choice, JsonObject, JsonSchema, Lark, OutputFormat, Regex
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires


@dataclass(frozen=True, slots=True)
class TextFormat:
    type: str = requires(OneOf(("text",)), "Plain text.")


@dataclass(frozen=True, slots=True)
class JsonObjectFormat:
    type: str = requires(OneOf(("json_object",)), "Any JSON object.")
    schema: dict[str, Any] | None = accepts(Anything(dict), "A JSON schema for it, as other servers take it here.")

    @property
    def output(self) -> OutputFormat:
        return JsonObject() if self.schema is None else JsonSchema(self.schema)


@dataclass(frozen=True, slots=True)
class NamedSchema:
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "What the schema is called.")
    schema: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema; any object where there is none.")
    description: str | None = accepts(Text(), "What it is for; the model is not told.")
    strict: bool | None = accepts(Bool(), "The answer is always held to the schema.")


@dataclass(frozen=True, slots=True)
class JsonSchemaFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    json_schema: NamedSchema = requires(ObjectOf(NamedSchema), "The schema.")

    @property
    def output(self) -> OutputFormat:
        schema = self.json_schema.schema
        return JsonObject() if schema is None else JsonSchema(schema)


FORMATS_REFUSED = {
    "structural_tag": "is not supported: send `tools`, whose calls are held to their schemas, or structured_outputs.",
    "regex": "is not known here: send structured_outputs.regex.",
    "grammar": "is not known here: send structured_outputs.grammar, in Lark's notation.",
    "ebnf": "is not known here: send structured_outputs.grammar, in Lark's notation.",
}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    json: dict[str, Any] | None = accepts(Anything(dict), "A JSON schema.")
    regex: str | None = accepts(Text(bounds.GRAMMAR_CHARS, least=1), "A regular expression.")
    choice: tuple[str, ...] | None = accepts(
        ListOf(Text(bounds.GRAMMAR_CHARS, least=1), bounds.GRAMMAR_CHOICES, least=1), "One of these texts."
    )
    grammar: str | None = accepts(Text(bounds.GRAMMAR_CHARS, least=1), "A grammar in Lark's notation.")
    json_object: bool | None = accepts(Bool(), "Any JSON object.")
    structural_tag: None = refuses(FORMATS_REFUSED["structural_tag"])

    @property
    def outputs(self) -> list[OutputFormat]:
        found: list[OutputFormat] = []
        if self.json is not None:
            found.append(JsonSchema(self.json))
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.choice is not None:
            found.append(Choice(self.choice))
        if self.grammar is not None:
            found.append(Lark(self.grammar))
        return [*found, JsonObject()] if self.json_object else found
