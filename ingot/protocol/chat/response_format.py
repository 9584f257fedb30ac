"""The forms that an answer can be held to, as OpenAI's and vLLM's chats describe them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.protocol.chat.ask import Choice, JsonObject, JsonSchema, Lark, OutputFormat, Regex, StructuralTags
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.text.grammar.calls import StructuralTag


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


@dataclass(frozen=True, slots=True)
class TagStructure:
    begin: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The text before the JSON; a trigger begins it.")
    schema: dict[str, Any] = requires(Anything(dict), "The JSON schema.")
    end: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The text behind the JSON.")


@dataclass(frozen=True, slots=True)
class StructuralTagFormat:
    type: str = requires(OneOf(("structural_tag",)), "Text that is free up to a trigger, and then JSON between tags.")
    structures: tuple[TagStructure, ...] = requires(ListOf(ObjectOf(TagStructure), bounds.TOOLS, least=1), "The tags.")
    triggers: tuple[str, ...] = requires(
        ListOf(Text(bounds.GRAMMAR_CHARS, least=1), bounds.TOOLS, least=1), "Texts that begin tags wherever they stand."
    )

    @property
    def output(self) -> OutputFormat:
        tags = (StructuralTag(one.begin, one.schema, one.end) for one in self.structures)
        return StructuralTags(tuple(tags), self.triggers)


FORMATS_REFUSED = {
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
    structural_tag: None = refuses("is not known here: send response_format of this type.")

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
