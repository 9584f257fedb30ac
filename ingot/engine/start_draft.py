"""The smaller model beside the target, for who guesses ahead and for who scores prompts: one for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ingot.cache.footprint import Footprint
from ingot.config import Settings
from ingot.engine.draft_model import DraftModel, budget_of
from ingot.engine.sparse.draft_scorer import DraftScorer
from ingot.engine.sparse.prefill import SparseOffer
from ingot.engine.speculation.same_tokens import check_tokenizers
from ingot.errors import ConfigError
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter

KEPT_SHARE = 0.5
"""Of the memory for a draft's states, what prefixes that it read may take."""
ROLES = ("draft", "scorer")
"""What it may be named as: who guesses ahead, and who scores prompts."""


def load_draft(settings: Settings, folder: Path, target: Adapter, models: Mapping[str, Path]) -> Adapter | None:
    """None where nothing needs one. Raises ConfigError where it is missing or is not one model, or has other tokens."""
    paths = {models[role].resolve(): models[role] for role in ROLES if role in models}
    if not paths:
        if settings.specprefill:
            raise ConfigError(
                "specprefill needs a smaller model that scores prompts: name it in specprefill_draft_model, or as the "
                "draft of speculate",
                param="specprefill_draft_model",
            )
        return None
    if len(paths) > 1:
        raise ConfigError(
            "specprefill_draft_model and the draft of speculate are two models: one is loaded for both. Name the same.",
            param="specprefill_draft_model",
        )
    [path] = paths.values()
    check_tokenizers(folder, path)
    # Layers that are one operation on CPUs do not tell what they attend to.
    apart = settings.specprefill and target.device.kind == "cpu"
    return adapters.load(path, target.device, dtype=settings.dtype, widest=settings.prefill_chunk, apart=apart)


def begin_draft(
    adapter: Adapter | None, target: Footprint, free: int, *, context: int, rows: int
) -> tuple[DraftModel | None, int]:
    """Its states, and the bytes that they take of those that all weights leave free."""
    if adapter is None:
        return None, 0
    budget = budget_of(adapter, target, free, context=context, rows=rows)
    model = DraftModel(adapter, budget, cache_bytes=int(KEPT_SHARE * budget.states))
    return model, budget.total - budget.weights


def sparse_offer(settings: Settings, draft: DraftModel | None) -> SparseOffer | None:
    """Raises ModelError where the draft cannot score."""
    if not settings.specprefill or draft is None:
        return None
    return SparseOffer(DraftScorer(draft), settings.specprefill_threshold, settings.specprefill_keep_pct)
