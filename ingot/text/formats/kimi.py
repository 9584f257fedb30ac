"""Kimi: in K2 a section of calls, each under an id that holds its name and number; in K3 elements that say types."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import KIMI_K3_THINK, THINK
from ingot.text.parser.arguments import JsonType, JsonTypes
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, KeyClose, Name, Ordinal, TextParameters

KIMI_K2 = Format(
    name="kimi-k2",
    forms=(
        CallForm(
            opening=("<|tool_calls_section_begin|>", Gap()),
            call=(
                "<|tool_call_begin|>",
                Gap(),
                Name(numbered=True),
                Gap(),
                "<|tool_call_argument_begin|>",
                Gap(),
                Arguments(JSON),
                Gap(),
                "<|tool_call_end|>",
            ),
            joint="",
            closing=(Gap(), "<|tool_calls_section_end|>"),
            unopened="anywhere",
        ),
    ),
    thinking=THINK,
    ids="kimi",
    signs=(("<|tool_calls_section_begin|>",), ("<|tool_call_begin|>",)),
    model_types=("kimi_k2", "kimi_k25"),
)


def _json_close(type: str, *kinds: JsonType) -> KeyClose:
    return KeyClose(f'" type="{type}"<|sep|>', "json", JsonTypes(kinds))


KIMI_K3 = Format(
    name="kimi-k3",
    forms=(
        CallForm(
            opening=("<|open|>tools<|sep|>", Gap()),
            call=(
                '<|open|>call tool="',
                Name(),
                '"',
                Ordinal(' index="', '"'),
                "<|sep|>",
                Gap(),
                TextParameters(
                    key_open='<|open|>argument key="',
                    key_closes=(
                        KeyClose('" type="string"<|sep|>', "text"),
                        _json_close("number", "number", "integer"),
                        _json_close("integer", "integer"),
                        _json_close("boolean", "boolean"),
                        _json_close("object", "object"),
                        _json_close("array", "array"),
                        _json_close("null", "null"),
                    ),
                    value_close="<|close|>argument<|sep|>",
                    end="<|close|>call<|sep|>",
                    object_tags=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
                ),
            ),
            joint="",
            closing=(Gap(), "<|close|>tools<|sep|>"),
            unopened="anywhere",
        ),
    ),
    thinking=KIMI_K3_THINK,
    strips=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    signs=(("<|open|>", "<|sep|>"),),
    model_types=("kimi_k3",),
)
