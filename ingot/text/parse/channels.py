"""Reads answers that are a row of messages, each with a header that says what its body is."""

from __future__ import annotations

import re
from contextlib import suppress

from ingot.text.parse.prose import Prose
from ingot.text.parser.calls import CallReader
from ingot.text.parser.events import Mismatch
from ingot.text.parser.reader import Steps, TextReader, markers
from ingot.text.tool_formats.format import CallForm, Elements, Format, TextParameters

LONGEST_HEADER = 1024
LONGEST_NAME = 256

_NAME = re.compile(r"[^\s<]+")


class ChannelReader:
    """Text outside of any message, as after a prompt that began one, is the answer's. Calls may stand there too."""

    def __init__(
        self, format: Format, reader: TextReader, calls: CallReader, reasoning: Prose, content: Prose, can_call: bool
    ) -> None:
        assert format.channels is not None
        self._channels = channels = format.channels
        self._forms = format.forms
        self._reader = reader
        self._calls = calls
        self._reasoning = reasoning
        self._content = content
        self._next_recipient = (f" {channels.recipient}",) if channels.unended else ()
        breaks = (channels.start, *channels.begins, *channels.ends, *self._next_recipient)
        self._within = markers(*breaks)
        openings = [form.opening[0] for form in format.forms if form.opening and can_call]
        self._openings = frozenset(opening for opening in openings if isinstance(opening, str))
        ends = [part.end for form in format.forms for part in form.call if isinstance(part, TextParameters | Elements)]
        closings = [part for form in format.forms for part in form.closing if isinstance(part, str)]
        self._closings = (*ends, *closings)  # what means nothing behind a call
        self._outside = self._awaited = markers(*breaks, *self._openings)
        self._bodies = markers(*channels.bodies)
        kinds = [(re.compile(pattern), kind) for pattern, kind in channels.kinds]
        self._kinds = [each for each in kinds if can_call or each[1] not in ("call", "calls")]
        self._prose = content

    @property
    def thinking(self) -> bool:
        return self._prose is self._reasoning

    def answer(self, opened: bool) -> Steps[None]:
        if opened:
            self._reasoning.restart()
            self._prose, self._awaited = self._reasoning, self._within
        elif (yield from self._within_header()):
            self._prose = yield from self._header()
        while (marker := (yield from self._reader.scan(self._awaited, self._prose.write))) is not None:
            if marker in self._channels.ends:
                self._reader.advance(self._reader.at + len(marker))
                self._prose, self._awaited = self._between(self._content), self._outside
            elif marker in self._openings:
                self._prose = yield from self._calls_in_forms()
            elif marker not in self._next_recipient or (yield from self._names_recipient(marker)):
                self._prose = yield from self._header()
        self._prose.finish()

    def _within_header(self) -> Steps[bool]:
        """Whether the answer goes on with the header that the prompt ended in: before any marker, a recipient may
        come, or a name, or nothing."""
        reader, recipient = self._reader, self._channels.recipient
        if (yield from reader.sees_in_turn((self._channels.bodies,))):
            return True
        if recipient:
            if (yield from reader.sees(" " + recipient)):
                return True
            return (yield from reader.sees(recipient))
        return (yield from self._names_recipient(""))

    def _names_recipient(self, before: str) -> Steps[bool]:
        """Whether a name and the marker of a body come next, behind `before`; if not, that and the name are text."""
        reader = self._reader
        reader.record()
        reader.advance(reader.at + len(before))
        yield from reader.run(_NAME, LONGEST_NAME)
        for body in self._channels.bodies:
            if (yield from reader.sees(body)):
                reader.unread(reader.recorded())
                return True
        self._prose.write(reader.recorded())
        return False

    def _header(self) -> Steps[Prose]:
        """Reads a header, and the body too if it is a call's; what the text that follows is."""
        reader = self._reader
        reader.record()
        found = yield from reader.until(self._bodies, LONGEST_HEADER)
        if found is None:
            if reader.cut:  # within the header
                reader.drop_rest()
            self._content.write(reader.recorded())
            return self._content
        reader.forget()
        self._awaited = self._within
        header = "".join(found)
        for pattern, kind in self._kinds:
            if (match := pattern.search(header)) is None:
                continue
            if kind == "call":
                return (yield from self._call(match[1]))
            if kind == "calls":
                self._between(self._content)
                return (yield from self._calls_in_forms())
            return self._between(self._reasoning if kind == "thinking" else self._content)
        return self._between(self._content)

    def _call(self, name: str) -> Steps[Prose]:
        self._between(self._content)
        self._reader.record()
        with suppress(Mismatch):
            yield from self._reader.gap()
            yield from self._calls.named(name)
        self._content.write(self._reader.recorded())
        return self._content

    def _calls_in_forms(self) -> Steps[Prose]:
        reader = self._reader
        self._reasoning.restart()
        goes_on = True
        strays: tuple[str, ...] = ()
        while goes_on:
            reader.record()
            yield from reader.gap()
            if (yield from reader.one_of(strays)) is not None:
                reader.forget()
                continue
            begun, strays = self._calls.begun, self._closings
            try:
                goes_on = yield from self._section()
            except Mismatch:
                goes_on = self._calls.begun > begun and not reader.cut  # behind a broken call others may come
                if reader.cut:
                    reader.drop_rest()
            self._content.write(reader.recorded())
        return self._content

    def _section(self) -> Steps[bool]:
        """Calls in the first form that begins here, if one does. Raises Mismatch."""
        for form in self._forms:
            if (yield from self._opens(form)):
                yield from self._calls.section((form,), opened=True)
                return True
            leading = form.leading(opened=False)
            if form.unopened != "never" and leading is not None and (yield from self._reader.sees(leading)):
                yield from self._calls.section((form,), opened=False)
                return True
        return False

    def _opens(self, form: CallForm) -> Steps[bool]:
        """Passes what opens the form, where there is anything."""
        marker = next((part for part in form.opening if isinstance(part, str)), None)
        if marker is not None:
            return (yield from self._reader.literal(marker))
        return (yield from self._reader.sees(form.leading(opened=False) or ""))

    def _between(self, prose: Prose) -> Prose:
        self._reasoning.restart()
        self._content.restart()
        return prose
