"""Arguments that are one object, told as JSON while they are read."""

from __future__ import annotations

from collections.abc import Callable

from ingot.text.formats.notation import Notation
from ingot.text.parser.events import Mismatch
from ingot.text.parser.reader import Steps, TextReader
from ingot.text.parser.values import Transcriber


def transcribed(reader: TextReader, notation: Notation, tell: Callable[[str], None]) -> Steps[None]:
    """Passes the object. Raises Mismatch where it breaks off; what is then in the record is text."""
    transcriber = Transcriber.of_arguments(notation)
    while wants_more(reader, transcriber):
        tell(transcriber.take())
        yield
    tell(transcriber.take())
    if transcriber.progress != "done":
        reader.record(transcriber.unwritten if transcriber.progress == "failed" else "")
        raise Mismatch


def wants_more(reader: TextReader, transcriber: Transcriber) -> bool:
    """Feeds what there is."""
    reader.advance(transcriber.feed(reader.text, reader.at))
    return transcriber.progress == "going" and not reader.ended
