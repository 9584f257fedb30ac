"""How much a grammar may cost: to send, to compile, to keep, and to follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MOST_CHARS = 256 * 1024
"""Of a schema, an expression, a list of choices or a grammar that a client sends."""
MOST_COMPILED_CHARS = 1024 * 1024
"""Of what is made of it: the calls of many tools put together."""
MOST_CHOICES = 4096
COMPILE_S = 2.0
"""Processor time that compiling may take,"""
COMPILE_WALL_S = 8.0
"""and the longest that it is waited for, on a machine that is busy with other things."""
COMPILERS = 4
"""Grammars that are compiled at the same time, each of another tenant."""
WAITING = 8
"""Requests of one tenant that wait for its grammars."""
WAIT_S = 8.0
"""Longest to wait for others' grammars to be compiled first."""
KEPT = 32
"""Compiled grammars that are kept, the latest used."""
SLOW_MASK_S = 0.005
"""Processor time of a token's mask that is slow. How slow it can be, the library's own limits say."""
SLOW_MASKS, SLOW_SHARE = 16, 4
"""Slow masks that following a grammar may take: so many at first, and one in so many. They are counted, not summed up:
a machine that stalls makes one mask slow, and no grammar too complex."""

_LEXER_STATES = 50_000  # about 1 kB each; a text of limited length takes one for each of its characters
_LEXER_STEP = 200_000  # about 14 ms
_ITEMS_STEP = 50_000  # about 3 ms


def parser_limits() -> LLParserLimits:
    """What the library itself keeps to, so that no single token costs more than some milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=_LEXER_STEP,
        step_max_items=_ITEMS_STEP,
        max_lexer_states=_LEXER_STATES,
        verbose_errors=False,
    )
