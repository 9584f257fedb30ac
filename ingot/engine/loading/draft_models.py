"""The smaller model beside the target, for who guesses ahead and for who scores prompts: one for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ingot.cache.footprint import Footprint
from ingot.config import Settings
from ingot.engine.draft_model import DraftModel, budget_of
from ingot.engine.sparse.statistics_scorer import StatisticsScorer
from ingot.engine.sparse.translated_scorer import TranslatedScorer
from ingot.engine.specprefill.prefill import SparseOffer
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.engine.speculation.same_tokens import check_tokenizers, difference
from ingot.errors import ConfigError
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokens.translation import Translation

KEPT_SHARE = 0.5
"""Of the memory for a draft's states, what prefixes that it read may take."""
ROLES = ("draft", "scorer")
"""What it may be named as: who guesses ahead, and who scores prompts."""


def load_draft(settings: Settings, folder: Path, target: Adapter, models: Mapping[str, Path]) -> Adapter | None:
    """None where nothing needs one. Raises ConfigError where it is missing or is not one model, or where one that
    guesses ahead has other tokens."""
    paths = {models[role].resolve(): models[role] for role in ROLES if role in models}
    scores = settings.specprefill and settings.specprefill_scorer == "draft"
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
        check_tokenizers(folder, path)
    return adapters.load(path, target.device, dtype=settings.dtype, widest=settings.prefill_chunk)


def begin_draft(
    adapter: Adapter | None, target: Footprint, free: int, *, context: int, rows: int
) -> tuple[DraftModel | None, int]:
    """Its states, and the bytes that they take of those that all weights leave free."""
    if adapter is None:
        return None, 0
    budget = budget_of(adapter, target, free, context=context, rows=rows)
    model = DraftModel(adapter, budget, cache_bytes=int(KEPT_SHARE * budget.states))
    return model, budget.total - budget.weights


def sparse_offer(
    settings: Settings, draft: DraftModel | None, tokenizer: Tokenizer, models: Mapping[str, Path]
) -> SparseOffer | None:
    """`tokenizer` is the target's. Raises ModelError where the draft cannot score."""
    if not settings.specprefill:
        return None
    threshold, keep = settings.specprefill_threshold, settings.specprefill_keep_pct
    if settings.specprefill_scorer == "statistics":
        return SparseOffer(StatisticsScorer(), threshold, keep)
    assert draft is not None
    scorer = DraftScorer(draft)
    theirs = Tokenizer.load(next(models[role] for role in ROLES if role in models))
    if difference(tokenizer, theirs) is None:
        return SparseOffer(scorer, threshold, keep)
    return SparseOffer(
        TranslatedScorer(scorer, theirs.eos_ids),
        threshold,
        keep,
        lambda prompt: Translation.of(prompt, tokenizer, theirs),
    )
