"""Who guesses ahead: from what the settings choose and what the model has to proposers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.engine.draft_model import DraftModel
from ingot.engine.speculation.draft_model import Draft
from ingot.engine.speculation.forced import Forced
from ingot.engine.speculation.lookup import Lookup
from ingot.engine.speculation.options import Choice
from ingot.engine.speculation.proposer import Proposer
from ingot.errors import ConfigError, ModelError
from ingot.models.adapter import Adapter
from ingot.models.draft_heads.checkpoint import find_head, refuse_unknown_head
from ingot.models.draft_heads.eagle import load_eagle
from ingot.models.draft_heads.mtp import load_head, with_head
from ingot.models.heads.probe import check_head


@dataclass(frozen=True, slots=True)
class OfferedProposers:
    adapter: Adapter  # with its head, if that guesses
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def begin(self, draft: DraftModel | None) -> list[Proposer]:
        """The proposers, but for the head. Raises ModelError where a draft cannot be one."""
        made: dict[str, Proposer] = {"forced": Forced(), "lookup": Lookup()}
        if draft is not None and "draft" in self.names:
            made["draft"] = Draft(draft, vocab=self.adapter.vocab)
        return [made[name] for name in self.names if name in made]


def offer_proposers(
    choice: Choice, folder: Path, adapter: Adapter, models: Mapping[str, Path], *, dtype: str | None
) -> OfferedProposers:
    """`models` are those of proposers that are models of their own; a draft is loaded apart.

    Raises ConfigError where somebody is asked for who is not there, ModelError where what there is does not work.
    """
    headed = adapter
    notes: tuple[str, ...] = ()
    if "eagle" in models:
        if _wants(choice, "mtp"):
            raise ConfigError("mtp and eagle exclude each other: one head can be shown what the model computes")
        headed = with_head(adapter, load_eagle(models["eagle"], adapter, dtype=dtype))
        check_head(headed.head, adapter)
    elif _wants(choice, "mtp"):
        headed, notes = _headed(choice, folder, adapter, dtype)
    head = () if headed.head is None else (headed.head.name,)
    offered = ("forced", "lookup", *head, *(("draft",) if "draft" in models else ()))
    choice.refuse_missing(offered)
    return OfferedProposers(headed, offered if choice.names is None else choice.names, notes)


def _wants(choice: Choice, name: str) -> bool:
    return choice.names is None or name in choice.names


def _headed(choice: Choice, folder: Path, adapter: Adapter, dtype: str | None) -> tuple[Adapter, tuple[str, ...]]:
    """The adapter with its head, or why it goes without. Who asks for the head is told by an error."""
    try:
        source = find_head(folder, adapter.config)
        if source is None:
            refuse_unknown_head(folder, adapter.config)
            return adapter, ()
        head = load_head(source, adapter, dtype=dtype)
        check_head(head, adapter)
        return with_head(adapter, head), ()
    except ModelError as error:
        if choice.names is not None:
            raise
        return adapter, (f"the model's MTP head is not used: {error}",)
