"""All example answers."""

from __future__ import annotations

from tests.text.tool_formats.drift import DRIFT
from tests.text.tool_formats.families import FAMILIES
from tests.text.tool_formats.unmarked import UNMARKED
from tests.text.tool_formats.wire import WIRE

CASES = [*WIRE, *DRIFT, *FAMILIES, *UNMARKED]
