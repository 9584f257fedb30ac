"""What count_tokens says of random prompts with pictures is what is generated from, and nothing is unpacked for it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.media import images
from ingot.protocol.anthropic.request import count_message_tokens, read_messages
from tests.media.pictures import FORMATS, file_of
from tests.media.seeing import STILLS, TIMED, UNTIMED, seeing

Block = dict[str, Any]
CALL = {"type": "tool_use", "id": "c1", "name": "see", "input": {}}


def block(width: int, height: int, format: str) -> Block:
    data = base64.b64encode(file_of(width, height, format)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": f"image/{format}", "data": data}}


WORDS = st.text(max_size=12).map(lambda words: {"type": "text", "text": words or "?"})
PICTURES = st.builds(block, st.integers(1, 120), st.integers(1, 120), st.sampled_from(FORMATS))
PARTS = st.lists(st.one_of(WORDS, PICTURES), min_size=1, max_size=5)
PROCESSORS = st.sampled_from([TIMED, UNTIMED, STILLS])


@st.composite
def conversations(draw: st.DrawFn) -> list[Block]:
    """Of the user, and of a tool that gives pictures back."""
    turns: list[Block] = [{"role": "user", "content": draw(PARTS)}]
    for given_back in draw(st.lists(st.booleans(), max_size=2)):
        parts = draw(PARTS)
        message = [CALL] if given_back else [{"type": "text", "text": "So."}]
        result = [{"type": "tool_result", "tool_use_id": "c1", "content": parts}] if given_back else parts
        turns += [{"role": "assistant", "content": message}, {"role": "user", "content": result}]
    return turns


@pytest.fixture(scope="module", autouse=True)
def _packed() -> Iterator[None]:
    """Nothing here can be unpacked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "decode_image", None)
        yield


def assert_exact(turns: list[Block], processor: Any) -> None:
    served = seeing(processor)
    request = read_messages({"messages": turns, "max_tokens": 9}, served, "msg_1").request
    assert count_message_tokens({"messages": turns}, served).input_tokens == len(request.prompts[0])


@settings(max_examples=20, deadline=None)
@given(turns=conversations(), processor=PROCESSORS)
def test_a_count_is_exact(turns: list[Block], processor: Any) -> None:
    assert_exact(turns, processor)


@pytest.mark.oracle
@settings(max_examples=200, deadline=None)
@given(turns=conversations(), processor=PROCESSORS)
def test_a_count_is_exact_for_two_hundred(turns: list[Block], processor: Any) -> None:
    assert_exact(turns, processor)
