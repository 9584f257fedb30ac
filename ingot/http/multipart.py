"""Forms with files, as browsers and SDKs send them (RFC 7578): bytes in, named values out, all of it bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ingot.errors import BadRequest

PARTS: Final = 64
HEAD_BYTES: Final = 8 << 10  # of one part
FIELD_BYTES: Final = 256 << 10  # of a part that is no file
BOUNDARY: Final = re.compile(r'(?i)\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
DISPOSITION: Final = re.compile(rb"(?i)(?:^|\r\n)content-disposition:\s*form-data\b([^\r\n]*)")
PARAMETER: Final = re.compile(rb'(?i);\s*(name|filename)="((?:[^"\\]|\\.)*)"')

Value = str | bytes
"""A field's text, or a file's bytes."""


def read_form(raw: bytes, content_type: str) -> dict[str, Value | list[Value]]:
    """The values by their names; those of a name that ends in [] are a list. Raises BadRequest."""
    form: dict[str, Value | list[Value]] = {}
    for name, value in parts_of(raw, boundary_of(content_type)):
        if name.endswith("[]"):
            listed = form.setdefault(name.removesuffix("[]"), [])
            if not isinstance(listed, list):
                raise BadRequest(f"The form has {name} both as a list and as one value.", param=name)
            listed.append(value)
        elif name in form:
            raise BadRequest(f"The form has {name[:100]} twice.", param=name[:100])
        else:
            form[name] = value
    return form


def boundary_of(content_type: str) -> bytes:
    found = BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("The content-type of a form names the boundary between its parts; this one does not.")
    return (found[1] or found[2]).encode("latin-1", "replace")


def parts_of(raw: bytes, boundary: bytes) -> Iterator[tuple[str, Value]]:
    between = b"\r\n--" + boundary
    first = raw.find(between[2:])
    if first < 0 or (first > 0 and not raw.startswith(between, first - 2)):
        raise broken()
    at = first + len(between) - 2
    for _ in range(PARTS):
        if raw.startswith(b"--", at):
            return
        begin = raw.find(b"\r\n", at)
        head_end = raw.find(b"\r\n\r\n", at, at + HEAD_BYTES)
        end = raw.find(between, head_end + 2) if head_end >= 0 else -1
        if begin < 0 or head_end < 0 or end < 0:
            raise broken()
        yield part(raw[begin:head_end], raw[head_end + 4 : end])
        at = end + len(between)
    raise BadRequest(f"The form has more than {PARTS} parts.")


def part(head: bytes, content: bytes) -> tuple[str, Value]:
    disposition = DISPOSITION.search(head)
    told = dict(PARAMETER.findall(disposition[1])) if disposition is not None else {}
    told = {key.lower(): value for key, value in told.items()}
    if b"name" not in told:
        raise BadRequest("A part of the form has no name.")
    name = told[b"name"].decode("utf-8", "replace")
    if b"filename" in told:
        return name, content
    if len(content) > FIELD_BYTES:
        raise BadRequest(f"{name[:100]} has more than {FIELD_BYTES} bytes.", param=name[:100])
    try:
        return name, content.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name[:100]} is not UTF-8.", param=name[:100]) from None


def broken() -> BadRequest:
    return BadRequest("The form is broken: a part of it does not begin or end as its boundary says.")
