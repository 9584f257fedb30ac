"""xLAM: an array of calls, bare or fenced."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall, Maybe
from ingot.text.formats.thinking import THINK

BARE = CallForm(opening=("[", Gap()), call=(JsonCall(),), joint=", ", closing=(Gap(), "]"), bare=True)
FENCED = CallForm(
    opening=("```", Maybe("json"), Gap("\n"), "[", Gap()),
    call=(JsonCall(),),
    joint=", ",
    closing=(Gap(), "]", Gap("\n"), "```"),
    bare=True,
)

XLAM = Format(
    name="xlam",
    forms=(BARE, FENCED),
    thinking=THINK,
    signs=(("single JSON array", "tool_call_name"),),
)
