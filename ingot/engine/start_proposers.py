"""Who guesses ahead: from what the settings choose and what the model has to proposers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.engine.speculation.choice import Choice
from ingot.engine.speculation.draft import Draft, budget_of
from ingot.engine.speculation.forced import Forced
from ingot.engine.speculation.lookup import Lookup
from ingot.engine.speculation.proposal import Proposer
from ingot.engine.speculation.same_tokens import check_tokenizers
from ingot.errors import ConfigError, ModelError
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter
from ingot.models.heads.eagle import load_eagle
from ingot.models.heads.finding import find_head
from ingot.models.heads.loading import load_head, with_head
from ingot.models.heads.probe import check_head

KEPT_SHARE = 0.5
"""Of the memory for a draft's states, what prefixes that it read may take."""


@dataclass(frozen=True, slots=True)
class OfferedProposers:
    adapter: Adapter  # with its head, if that guesses
    draft: Adapter | None
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """What further models take."""
        return 0 if self.draft is None else self.draft.weight_bytes

    def begin(self, free: int, *, context: int, rows: int) -> tuple[list[Proposer], int]:
        """The proposers, but for the head, and the bytes that their states take of those that all weights leave free.

        Raises ModelError where a draft cannot be one.
        """
        made: dict[str, Proposer] = {"forced": Forced(), "lookup": Lookup()}
        taken = 0
        if self.draft is not None:
            budget = budget_of(self.draft, self.adapter.footprint, free, context=context, rows=rows)
            taken = budget.total - budget.weights
            kept = int(KEPT_SHARE * budget.states)
            made["draft"] = Draft(self.draft, budget, vocab=self.adapter.vocab, cache_bytes=kept)
        return [made[name] for name in self.names if name in made], taken


def offer_proposers(
    choice: Choice, folder: Path, adapter: Adapter, models: Mapping[str, Path], *, dtype: str | None, widest: int
) -> OfferedProposers:
    """`models` are those of proposers that are models of their own.

    Raises ConfigError where somebody is asked for who is not there, ModelError where what there is does not work.
    """
    headed, draft = adapter, None
    notes: tuple[str, ...] = ()
    if "eagle" in models:
        if _wants(choice, "mtp"):
            raise ConfigError("mtp and eagle exclude each other: one head can be shown what the model computes")
        headed = with_head(adapter, load_eagle(models["eagle"], adapter, dtype=dtype))
        check_head(headed.head, adapter)
    elif _wants(choice, "mtp"):
        headed, notes = _headed(choice, folder, adapter, dtype)
    if "draft" in models:
        check_tokenizers(folder, models["draft"])
        draft = adapters.load(models["draft"], adapter.device, dtype=dtype, widest=widest)
    head = () if headed.head is None else (headed.head.name,)
    offered = ("forced", "lookup", *head, *(() if draft is None else ("draft",)))
    choice.refuse_missing(offered)
    return OfferedProposers(headed, draft, offered if choice.names is None else choice.names, notes)


def _wants(choice: Choice, name: str) -> bool:
    return choice.names is None or name in choice.names


def _headed(choice: Choice, folder: Path, adapter: Adapter, dtype: str | None) -> tuple[Adapter, tuple[str, ...]]:
    """The adapter with its head, or why it goes without. Who asks for the head is told by an error."""
    try:
        source = find_head(folder, adapter.config)
        if source is None:
            return adapter, ()
        head = load_head(source, adapter, dtype=dtype)
        check_head(head, adapter)
        return with_head(adapter, head), ()
    except ModelError as error:
        if choice.names is not None:
            raise
        return adapter, (f"the model's MTP head is not used: {error}",)
