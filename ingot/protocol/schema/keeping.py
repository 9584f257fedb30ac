"""The field by which a request says how long its model stays loaded, as LM Studio has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Delegate, Number
from ingot.protocol.terms import Terms

HOW_LONG: Final = "Seconds that the model stays loaded after the request; one that is alone always stays."


@dataclass(frozen=True, slots=True)
class TimeToLive(Delegate):
    """Seconds. Who keeps the models has read it by then; where there is one, it has no effect."""

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        self.kind(reading.terms).parse(value, path, reading)
        if not reading.terms.unloads:
            reading.ignore(path)

    def kind(self, terms: Terms) -> Number:
        return Number(bounds.TTL_S)
