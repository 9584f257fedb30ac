"""xLAM: an array of calls, bare or fenced."""

from __future__ import annotations

from ingot.text.formats.shapes import array
from ingot.text.formats.table import Format, Gap, Maybe
from ingot.text.formats.thinking import THINK

BARE = array(bare=True)
FENCED = array("```", Maybe("json"), Gap("\n"), after=(Gap("\n"), "```"), bare=True)

XLAM = Format(
    name="xlam",
    forms=(BARE, FENCED),
    thinking=THINK,
    signs=(("single JSON array", "tool_call_name"),),
)
