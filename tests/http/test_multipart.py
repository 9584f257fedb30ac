"""Forms with files: what is read, and what is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.http.multipart import FIELD_BYTES, PARTS, read_form

TYPE = "multipart/form-data; boundary=XyZ"


def form(*parts: tuple[str, bytes], preamble: bytes = b"", end: bytes = b"--\r\n") -> bytes:
    body = b"".join(
        b"--XyZ\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return preamble + body + b"--XyZ" + end


def test_fields_are_texts_and_files_are_bytes() -> None:
    raw = form(('name="model"', "höre".encode()), ('name="file"; filename="a.wav"', b"\x00\r\n--Xy\xff"))
    assert read_form(raw, TYPE) == {"model": "höre", "file": b"\x00\r\n--Xy\xff"}


def test_a_name_with_brackets_is_a_list() -> None:
    raw = form(('name="include[]"', b"a"), ('name="include[]"', b"b"))
    assert read_form(raw, TYPE) == {"include": ["a", "b"]}


def test_further_headers_a_quoted_boundary_and_a_preamble_are_taken() -> None:
    head = 'name="file"; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav'
    raw = form((head, b"x"), preamble=b"to whom it may concern\r\n")
    assert read_form(raw, 'multipart/form-data; charset=utf-8; boundary="XyZ"') == {"file": b"x"}


@given(st.binary(max_size=300))
def test_a_file_of_any_bytes_comes_out_as_it_went_in(content: bytes) -> None:
    assert read_form(form(('name="file"; filename="a"', content)), TYPE) == {"file": content}


@given(st.binary(max_size=200))
def test_a_body_of_any_bytes_is_read_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        read_form(raw.replace(b"q", b"--XyZ\r\n"), TYPE)


@pytest.mark.parametrize(
    ("raw", "type", "says"),
    [
        (form(('name="a"', b"1")), "multipart/form-data", "names the boundary"),
        (b"", TYPE, "broken"),
        (b"no form", TYPE, "broken"),
        (form(('name="a"', b"1"))[:-9], TYPE, "broken"),
        (form(('name="a"', b"1"), ('name="a"', b"2")), TYPE, "twice"),
        (form(('name="a"', b"1"), ('name="a[]"', b"2")), TYPE, "both as a list"),
        (form(("nothing", b"1")), TYPE, "no name"),
        (form(('name="a"', b"\xff")), TYPE, "not UTF-8"),
        (form(('name="a"', b"x" * (FIELD_BYTES + 1))), TYPE, "more than"),
        (form(*((f'name="a{n}"', b"1") for n in range(PARTS + 1))), TYPE, "more than 64 parts"),
        (form(('name="a"' + "x" * 9000, b"1")), TYPE, "broken"),
    ],
)
def test_what_is_broken_or_too_much_is_refused(raw: bytes, type: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        read_form(raw, type)
