"""Who guesses ahead: from what the settings choose and what the model has to proposers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.engine.speculation.choice import Choice
from ingot.engine.speculation.forced import Forced
from ingot.engine.speculation.lookup import Lookup
from ingot.engine.speculation.proposal import Proposer
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from ingot.models.heads.finding import find_head
from ingot.models.heads.loading import load_head, with_head
from ingot.models.heads.probe import check_head


@dataclass(frozen=True, slots=True)
class OfferedProposers:
    adapter: Adapter  # with its head, if that guesses
    proposers: Sequence[Proposer]  # without the head
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def offer_proposers(choice: Choice, folder: Path, adapter: Adapter, *, dtype: str | None) -> OfferedProposers:
    """Raises ConfigError where somebody is asked for who is not there, ModelError where what there is does not work."""
    proposers: list[Proposer] = []
    if wants(choice, "forced"):
        proposers.append(Forced())
    if wants(choice, "lookup"):
        proposers.append(Lookup())
    headed, notes = _headed(choice, folder, adapter, dtype) if wants(choice, "mtp") else (adapter, ())
    names = (*(proposer.name for proposer in proposers), *(("mtp",) if headed.head is not None else ()))
    choice.refuse_missing(names)
    return OfferedProposers(headed, proposers, names, notes)


def wants(choice: Choice, name: str) -> bool:
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
