"""Who proposes draft tokens and who scores prompts: from what the settings choose and what the model has to proposers
and scorers. One draft model is loaded for both.

Runs on the engine thread. Raises ConfigError where somebody is asked for who is not there, or a draft has other
tokens than the target; ModelError where what there is does not work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingot.cache.footprint import Footprint
from ingot.config import Settings
from ingot.distributed.leader import LeaderAdapter
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.specprefill.scorers import DraftScorer, StatisticsScorer, TranslatedScorer
from ingot.engine.speculation.draft_model import DraftModel, DraftModelProposer, draft_budget
from ingot.engine.speculation.lookup import LookupProposer
from ingot.engine.speculation.options import SpeculationOptions
from ingot.engine.speculation.proposer import ForcedTokensProposer, Proposer
from ingot.errors import ConfigError, ModelError
from ingot.models import adapter as adapters
from ingot.models.adapter import ModelAdapter
from ingot.models.draft_heads.checkpoint import find_head, refuse_unknown_head
from ingot.models.draft_heads.eagle import load_eagle
from ingot.models.draft_heads.loading import drafter_kind, load_drafter, own_drafter
from ingot.models.draft_heads.mtp import DraftHead, check_draft_head, load_mtp_head, with_draft_head
from ingot.text.tokenizer.tokenizer import PromptTranslation, Tokenizer

MODEL_FREE_PROPOSERS: Final[dict[str, Callable[[], Proposer]]] = {
    "forced": ForcedTokensProposer,
    "lookup": LookupProposer,
}
"""Proposers that need neither a model nor a head, by name, in order of preference."""


@dataclass(frozen=True, slots=True)
class ChosenProposers:
    adapter: ModelAdapter  # with its draft head, if it has one
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def begin(self, draft: DraftModel | None) -> list[Proposer]:
        """The proposers, but for the head. Raises ModelError where a draft cannot be one."""
        proposers = {name: make() for name, make in MODEL_FREE_PROPOSERS.items()}
        if draft is not None and "draft" in self.names:
            proposers["draft"] = DraftModelProposer(draft, vocab=self.adapter.vocab)
        return [proposers[name] for name in self.names if name in proposers]


def choose_proposers(
    choice: SpeculationOptions, folder: Path, adapter: ModelAdapter, models: Mapping[str, Path], *, dtype: str | None
) -> ChosenProposers:
    """`models` are those of proposers that are models of their own; a draft is loaded apart.

    Raises ConfigError where somebody is asked for who is not there, ModelError where what there is does not work.
    """
    headed = adapter
    notes: tuple[str, ...] = ()
    drafters = [name for name in DRAFTERS if name in models]
    if drafters:
        asked = [name for name in ("mtp", "draft", "eagle") if name in (choice.names or ())]
        if len(drafters) > 1 or "mtp" in asked:
            raise ConfigError(f"{' and '.join(asked)} exclude each other: one head can read what the model computes")
        head = (load_eagle if drafters == ["eagle"] else load_drafter)(models[drafters[0]], adapter, dtype=dtype)
        head.name = "eagle" if drafters == ["eagle"] else "draft"
        headed = _tried(head, adapter)
    elif _is_wanted(choice, "mtp"):
        headed, notes = _with_mtp_head(choice, folder, adapter, dtype)
    named = () if headed.head is None else (headed.head.name,)
    offered = (*MODEL_FREE_PROPOSERS, *named, *(("draft",) if "draft" in models else ()))
    choice.refuse_missing(offered)
    return ChosenProposers(headed, offered if choice.names is None else choice.names, notes)


def _is_wanted(choice: SpeculationOptions, name: str) -> bool:
    return choice.names is None or name in choice.names


def _with_mtp_head(
    choice: SpeculationOptions, folder: Path, adapter: ModelAdapter, dtype: str | None
) -> tuple[ModelAdapter, tuple[str, ...]]:
    """The adapter with its head, or why it goes without. Where the settings ask for the head, that is an error."""
    try:
        if (drafter := own_drafter(folder)) is not None:
            if isinstance(adapter, LeaderAdapter):
                raise ModelError(f"{drafter.name} is a drafter, and ranks take a whole model or an EAGLE head.")
            head = load_drafter(drafter, adapter, dtype=dtype)
            head.name = "mtp"
            return _tried(head, adapter), ()
        if (source := find_head(folder, adapter.config)) is not None:
            return _tried(load_mtp_head(source, adapter, dtype=dtype), adapter), ()
        refuse_unknown_head(folder, adapter.config)
        return adapter, ()
    except ModelError as error:
        if choice.names is not None:
            raise
        return adapter, (f"the model's MTP head is not used: {error}",)


def _tried(head: DraftHead, adapter: ModelAdapter) -> ModelAdapter:
    """The adapter with a head that is worth running. Raises ModelError."""
    headed = with_draft_head(adapter, head)
    check_draft_head(head, headed)
    return headed


DRAFTERS: Final = ("drafter", "eagle")
"""Roles of models that are draft heads."""


def with_drafter_role(models: Mapping[str, Path]) -> dict[str, Path]:
    """The models of proposers by their roles, with `drafter` instead of `draft` where that is no model but a head.
    Raises ModelError where the folder cannot be read."""
    is_head = "draft" in models and drafter_kind(models["draft"]) is not None
    return {"drafter" if is_head and role == "draft" else role: path for role, path in models.items()}


DRAFT_CACHE_SHARE = 0.5
"""Of the memory for a draft's KV, what cached prefixes may take."""
DRAFT_ROLES = ("draft", "scorer")
"""What it may be named as: it proposes draft tokens, or it scores prompts."""


def load_draft(
    settings: Settings, folder: Path, target: ModelAdapter, models: Mapping[str, Path]
) -> ModelAdapter | None:
    """None where nothing needs one. Raises ConfigError where it is missing or is not one model, or where one that
    proposes has other tokens."""
    paths = {models[role].resolve(): models[role] for role in DRAFT_ROLES if role in models}
    scores = settings.specprefill != "off" and settings.specprefill_scorer == "draft"
    if not paths:
        if scores:
            raise ConfigError(
                "specprefill needs a smaller model that scores prompts: name it in specprefill_draft_model, or as the "
                "draft of speculate; or choose specprefill_scorer statistics, which needs none",
                param="specprefill_draft_model",
            )
        return None
    if len(paths) > 1:
        raise ConfigError(
            "specprefill_draft_model and the draft of speculate are two models: one is loaded for both. Name the same.",
            param="specprefill_draft_model",
        )
    [path] = paths.values()
    if "draft" in models:
        refuse_different_tokenizers(folder, path)
    return adapters.load_model_adapter(path, target.device, dtype=settings.dtype, widest=settings.prefill_chunk)


def make_draft_model(
    adapter: ModelAdapter | None, target: Footprint, free: int, *, context: int, rows: int
) -> tuple[DraftModel | None, int]:
    """The draft model, and the bytes that its KV takes of those that all weights leave free."""
    if adapter is None:
        return None, 0
    budget = draft_budget(adapter, target, free, context=context, rows=rows)
    model = DraftModel(adapter, budget, cache_bytes=int(DRAFT_CACHE_SHARE * budget.states))
    return model, budget.total - budget.weights


def make_specprefill(
    settings: Settings,
    target: ModelAdapter,
    draft: DraftModel | None,
    tokenizer: Tokenizer,
    models: Mapping[str, Path],
) -> SpecPrefillSetup | None:
    """`tokenizer` is the target's. Raises ModelError where the draft cannot score."""
    if settings.specprefill == "off":
        return None
    threshold, keep = settings.specprefill_threshold, settings.specprefill_keep_pct
    if settings.specprefill_scorer == "statistics":
        return SpecPrefillSetup(StatisticsScorer(), threshold, keep)
    assert draft is not None
    setup = SpecPrefillSetup(
        DraftScorer(draft),
        threshold,
        keep,
        quality=settings.specprefill_quality,
        expected_cost=draft.adapter.weight_bytes / target.weight_bytes,
    )
    theirs = Tokenizer.load(next(models[role] for role in DRAFT_ROLES if role in models))
    if tokenizer_difference(tokenizer, theirs) is None:
        return setup
    return replace(
        setup,
        scorer=TranslatedScorer(setup.scorer, theirs.eos_ids),
        translate=lambda prompt: PromptTranslation.of(prompt, tokenizer, theirs),
    )


def refuse_different_tokenizers(target: Path, draft: Path) -> None:
    """Raises ConfigError, which says where they differ, unless the tokenizers of two models' folders have the same
    tokens under the same numbers."""
    found = tokenizer_difference(Tokenizer.load(target), Tokenizer.load(draft))
    if found is not None:
        raise ConfigError(
            f"{draft.name} cannot draft for {target.name}, as their tokenizers differ: {found}. Choose a draft of the "
            "same family."
        )


def tokenizer_difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """The first difference, in words."""
    if ours.vocab_size != theirs.vocab_size:
        return f"one has {ours.vocab_size} tokens, the draft's has {theirs.vocab_size}"
    for id in range(ours.vocab_size):
        if ours.token_bytes(id) != theirs.token_bytes(id):
            return f"token {id} is {ours.token_text(id)!r}, the draft's is {theirs.token_text(id)!r}"
    return None
