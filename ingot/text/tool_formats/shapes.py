"""Shapes that the calls of several families have, whatever their markers are."""

from __future__ import annotations

from typing import Any

from ingot.text.tool_formats.format import CallForm, Gap, JsonCall, KeyClose, Name, Part, TagEnd, TextParameters


def array(*before: Part, call: tuple[Part, ...] = (JsonCall(),), after: tuple[Part, ...] = (), **said: Any) -> CallForm:
    """An array of calls, with what stands before and after it."""
    return CallForm(opening=(*before, "[", Gap()), call=call, joint=", ", closing=(Gap(), "]", *after), **said)


def element(tag: str, *call: Part, **said: Any) -> CallForm:
    """Calls between an opening and a closing tag, on lines of their own."""
    return CallForm(opening=(f"<{tag}>", Gap("\n")), call=call, closing=(Gap("\n"), f"</{tag}>"), **said)


def named_tags(
    function: str, parameter: str, gap: str = "\n", key_closes: tuple[KeyClose, ...] = (KeyClose('">'),), **said: Any
) -> tuple[Part, ...]:
    """Tags with a name: `<invoke name="f">`, and in it `<parameter name="x">` for each argument."""
    parameters = TextParameters(f'<{parameter} name="', key_closes, f"</{parameter}>", f"</{function}>", **said)
    return f'<{function} name="', Name(), TagEnd('">', alone=('"/>', '" />')), Gap(gap), parameters


def typed_tags(mark: str, section: str, prefix: str = "") -> CallForm:
    """A section of invocations whose parameters say whether they are text or JSON, with `mark` in each tag."""
    closes = (
        KeyClose('" string="true">', "text"),
        KeyClose('" string="false">', "json"),
        KeyClose('">', written=False),
    )
    tags = f"{mark}{prefix}invoke", f"{mark}{prefix}parameter"
    call = named_tags(*tags, key_closes=closes, wrappers=("arguments", "input"))
    return element(f"{mark}{section}", *call, joint="\n", unopened="anywhere")


def assigned_tags(**said: Any) -> tuple[Part, ...]:
    """Tags that a name is assigned to: `<function=f>`, and in it `<parameter=x>` for each argument."""
    parameters = TextParameters("<parameter=", (KeyClose(">"),), "</parameter>", "</function>", **said)
    return "<function=", Name(), TagEnd(">"), Gap("\n"), parameters


def keys_and_values(end: str, before: str = "", behind: str = "", **said: Any) -> TextParameters:
    """Each key and each value between tags of its own, in the manner of GLM."""
    key, value = f"{before}arg_key{behind}", f"{before}arg_value{behind}"
    closes = (KeyClose(f"</{key}>"),)
    return TextParameters(f"<{key}>", closes, f"</{value}>", f"</{end}{behind}>", f"<{value}>", **said)
