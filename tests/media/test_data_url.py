"""Files inside of texts: read as they were written, or refused in words."""

from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadMedia
from ingot.media.data_url import decoded, split


@given(data=st.binary(max_size=300), width=st.integers(1, 80))
def test_a_file_comes_back_whatever_lines_and_padding_it_was_written_with(data: bytes, width: int) -> None:
    text = base64.b64encode(data).decode()
    lines = "\r\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert decoded(text) == decoded(lines) == decoded(text.rstrip("=")) == data


@given(text=st.text(max_size=40))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    with suppress(BadMedia):
        decoded(text)
    with suppress(BadMedia):
        split("data:" + text)


@pytest.mark.parametrize("text", ["!", "AA=A", "A", "AA==AA==", "Ä", "\ud800"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(BadMedia, match="no base64"):
        decoded(text)


def test_a_data_url_states_its_type_and_is_in_base64() -> None:
    assert split("data:IMAGE/PNG;base64,AAAA") == ("image/png", "AAAA")
    assert split("data:video/mp4;codecs=avc1;base64,AAAA") == ("video/mp4", "AAAA")
    assert split("data:;base64,AAAA") == ("", "AAAA")
    for url in ("data:image/png,AAAA", "data:image/png;base64", "data:" + "a" * 300 + ";base64,AAAA", "image/png"):
        with pytest.raises(BadMedia, match="as in data:image/png;base64"):
            split(url)
