"""What a request may say of computed prefixes."""

from __future__ import annotations

from typing import Final

from ingot.protocol.schema.fields import OneOf

REUSE: Final = OneOf(("auto", "exact", "off"))
WHAT_IS_REUSED: Final = (
    "`off` computes everything anew and keeps nothing of this request; `exact` takes over nothing that went through a "
    "lossy `--cache-codec`."
)
