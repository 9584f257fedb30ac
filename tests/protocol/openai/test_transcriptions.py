"""Subtitles, read by what reads them elsewhere."""

from __future__ import annotations

import re

from ingot.protocol.openai.subtitles import srt, stamp, vtt
from tests.http.scripted_hearing import SEGMENTS

SRT = re.compile(
    r"(?:\d+\n\d\d:[0-5]\d:[0-5]\d,\d{3} --> \d\d:[0-5]\d:[0-5]\d,\d{3}\n[^\n]+\n\n)*",
)
VTT = re.compile(
    r"WEBVTT\n\n(?:\d\d:[0-5]\d:[0-5]\d\.\d{3} --> \d\d:[0-5]\d:[0-5]\d\.\d{3}\n(?:(?!-->)[^\n<])+\n\n)*",
)


def test_srt_is_numbered_from_one() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,000\nHello, you.\n\n2\n00:01:01,000 --> 01:01:02,500\n<Good> -> bye & é.\n\n"
    )
    assert SRT.fullmatch(srt(SEGMENTS)) and SRT.fullmatch(srt(()))


def test_vtt_writes_no_tags_and_no_arrows() -> None:
    assert vtt(SEGMENTS).endswith("00:01:01.000 --> 01:01:02.500\n&lt;Good> -> bye &amp; é.\n\n")
    assert VTT.fullmatch(vtt(SEGMENTS)) and VTT.fullmatch(vtt(()))


def test_times_are_rounded_once() -> None:
    assert stamp(59.9996, ".") == "00:01:00.000" and stamp(360_000.0, ",") == "100:00:00,000"
