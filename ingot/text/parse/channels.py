"""Reads answers that are a row of messages, each with a header that says what its body is."""

from __future__ import annotations

import re
from contextlib import suppress

from ingot.text.formats.table import Format
from ingot.text.parse.call_events import Mismatch
from ingot.text.parse.calls import CallReader
from ingot.text.parse.prose import Prose
from ingot.text.parse.reader import Steps, TextReader, markers

LONGEST_HEADER = 1024


class ChannelReader:
    """Text outside of any message, as after a prompt that began one, is the answer's."""

    def __init__(
        self, format: Format, reader: TextReader, calls: CallReader, reasoning: Prose, content: Prose, can_call: bool
    ) -> None:
        assert format.channels is not None
        self._channels = channels = format.channels
        self._reader = reader
        self._calls = calls
        self._reasoning = reasoning
        self._content = content
        self._can_call = can_call
        self._breaks = markers(channels.start, channels.channel, *channels.ends)
        self._message = markers(channels.message)
        self._recipient = re.compile(re.escape(channels.recipient) + r"([^\s<]+)")
        self._channel = re.compile(re.escape(channels.channel) + r"\s*(\w+)")
        self._prose = content

    @property
    def thinking(self) -> bool:
        return self._prose is self._reasoning

    def answer(self, opened: bool) -> Steps[None]:
        if opened:
            self._reasoning.restart()
            self._prose = self._reasoning
        if not opened and (yield from self._recipient_first()):
            self._prose = yield from self._header()
        while (marker := (yield from self._reader.scan(self._breaks, self._prose.write))) is not None:
            if marker in self._channels.ends:
                self._reader.advance(self._reader.at + len(marker))
                self._prose = self._between(self._content)
            else:
                self._prose = yield from self._header()
        self._prose.finish()

    def _recipient_first(self) -> Steps[bool]:
        """The prompt ends with the role, behind which a recipient may come before any marker."""
        if (yield from self._reader.sees(" " + self._channels.recipient)):
            return True
        return (yield from self._reader.sees(self._channels.recipient))

    def _header(self) -> Steps[Prose]:
        """Reads a header, and the body too if it is a call's; what the text that follows is."""
        reader = self._reader
        reader.record()
        found = yield from reader.until(self._message, LONGEST_HEADER)
        if found is None:
            if reader.cut:  # within the header
                reader.drop_rest()
            self._content.write(reader.recorded())
            return self._content
        reader.forget()
        header = found[0]
        if self._can_call and (called := self._recipient.search(header)) is not None:
            return (yield from self._call(called[1]))
        channel = self._channel.search(header)
        thinking = channel is not None and channel[1] in self._channels.thinking
        return self._between(self._reasoning if thinking else self._content)

    def _call(self, name: str) -> Steps[Prose]:
        self._between(self._content)
        self._reader.record()
        with suppress(Mismatch):
            yield from self._reader.gap()
            yield from self._calls.named(name)
        self._content.write(self._reader.recorded())
        return self._content

    def _between(self, prose: Prose) -> Prose:
        self._reasoning.restart()
        self._content.restart()
        return prose
