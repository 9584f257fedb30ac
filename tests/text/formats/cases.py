"""All answers that are known."""

from __future__ import annotations

from tests.text.formats.drift import DRIFT
from tests.text.formats.families import FAMILIES
from tests.text.formats.unmarked import UNMARKED
from tests.text.formats.wire import WIRE

CASES = [*WIRE, *DRIFT, *FAMILIES, *UNMARKED]
