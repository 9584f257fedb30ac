"""What a body may say of thinking, in our words and in those of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import BadRequest
from ingot.protocol.chat.ask import EFFORTS, ThinkingOptions
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, OneOf
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.schema.stopping import Limit
from ingot.protocol.schema.unheeded import Passed


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """As OpenRouter has it."""

    effort: str | None = accepts(OneOf(EFFORTS), "How much to think; `none` answers at once.")
    max_tokens: int | None = accepts(Limit(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    enabled: bool | None = accepts(Bool(), "Switches thinking on or off.")
    exclude: bool = accepts(Bool(), "Think, but leave the thinking out of the answer.", default=False)
    summary: None = accepts(Passed("auto", "detailed"), "The thinking is always told whole.")


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """As DeepSeek, Z.ai and Moonshot have it."""

    type: str = requires(OneOf(("enabled", "disabled", "auto", "adaptive")), "Whether to think, or as the model does.")
    budget_tokens: int | None = accepts(Limit(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    clear_thinking: None = accepts(Passed(), "`template_history` says what becomes of past thinking.")

    @property
    def enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


REASONING, THINKING = ObjectOf(ReasoningWish), ObjectOf(ThinkingWish)


def thinking_options(**said: Mapping[str, Any]) -> ThinkingOptions:
    """`said` holds, for each thing to be asked, what each field says of it. Raises BadRequest where two differ."""
    found = {what: {name: value for name, value in by.items() if value is not None} for what, by in said.items()}
    for by in found.values():
        if len(set(by.values())) > 1:
            first, second, *_ = by
            raise BadRequest(
                f"{first} and {second} say the same thing in two ways, and differ: send one.", param=second
            )
    fields = {what: next(iter(by)) for what, by in found.items() if by}
    return ThinkingOptions(**{what: by[fields[what]] for what, by in found.items() if by}, fields=fields)
