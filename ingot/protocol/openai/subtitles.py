"""Transcripts as subtitles: SubRip (SRT) and WebVTT."""

from __future__ import annotations

from collections.abc import Iterable

from ingot.engine.speech_request import Segment


def srt(segments: Iterable[Segment]) -> str:
    return "".join(
        f"{number}\n{stamp(one.start, ',')} --> {stamp(one.end, ',')}\n{line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    cues = (f"{stamp(one.start, '.')} --> {stamp(one.end, '.')}\n{escaped(line(one.text))}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(cues)


def stamp(seconds: float, point: str) -> str:
    """`00:01:02.030`, with the point that the format wants."""
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def line(text: str) -> str:
    """On one line, and without what would be taken for the line of times."""
    return " ".join(text.split()).replace("-->", "->")


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
