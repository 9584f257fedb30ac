"""Subtitles, read by what reads them elsewhere."""

from __future__ import annotations

import re

from ingot.protocol.openai.transcriptions import format_srt, format_timestamp, format_vtt
from tests.http.scripted_hearing import SEGMENTS

SRT = re.compile(
    r"(?:\d+\n\d\d:[0-5]\d:[0-5]\d,\d{3} --> \d\d:[0-5]\d:[0-5]\d,\d{3}\n[^\n]+\n\n)*",
)
VTT = re.compile(
    r"WEBVTT\n\n(?:\d\d:[0-5]\d:[0-5]\d\.\d{3} --> \d\d:[0-5]\d:[0-5]\d\.\d{3}\n(?:(?!-->)[^\n<])+\n\n)*",
)


def test_srt_is_numbered_from_one() -> None:
    assert format_srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,000\nHello, you.\n\n2\n00:01:01,000 --> 01:01:02,500\n<Good> -> bye & é.\n\n"
    )
    assert SRT.fullmatch(format_srt(SEGMENTS)) and SRT.fullmatch(format_srt(()))


def test_vtt_writes_no_tags_and_no_arrows() -> None:
    assert format_vtt(SEGMENTS).endswith("00:01:01.000 --> 01:01:02.500\n&lt;Good> -> bye &amp; é.\n\n")
    assert VTT.fullmatch(format_vtt(SEGMENTS)) and VTT.fullmatch(format_vtt(()))


def test_times_are_rounded_once() -> None:
    assert format_timestamp(59.9996, ".") == "00:01:00.000" and format_timestamp(360_000.0, ",") == "100:00:00,000"
