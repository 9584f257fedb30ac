"""The model that generates, with all that runs in its passes or guesses for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.config import Settings
from ingot.engine.loading.draft_models import load_draft
from ingot.engine.loras import NamedLoras
from ingot.engine.speculation.options import Choice
from ingot.engine.start_loras import begin_loras
from ingot.engine.start_proposers import OfferedProposers, offer_proposers
from ingot.engine.start_ranks import among_ranks, load_leading
from ingot.kernels.device import Device
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter
from ingot.models.files.locate import ModelFolder
from ingot.models.kv_codec import with_live_codec
from ingot.ranks.joining import Joined


@dataclass(frozen=True, slots=True)
class Target:
    adapter: Adapter  # with its head, and with live states in what was asked for
    guessing: OfferedProposers
    guessed_tokens: int | None
    draft: Adapter | None  # the smaller model, for guesses and for scores
    loras: NamedLoras | None
    lora_bytes: int  # that they take at most

    @property
    def weights(self) -> int:
        """Bytes of all that."""
        return self.adapter.weight_bytes + self.lora_bytes + (0 if self.draft is None else self.draft.weight_bytes)


def load_target(
    settings: Settings,
    folder: ModelFolder,
    further: Mapping[str, Path],
    here: Device,
    joined: Joined | None,
    total: int,
    *,
    sees: bool,
) -> Target:
    """Of `joined` ranks, rank 0's share, which has `total` bytes. Raises ModelError or ConfigError."""
    plain, choice = _plain(settings, folder.path, further, here, joined, total, sees=sees)
    guessing = offer_proposers(choice, folder.path, plain, further, dtype=settings.dtype)
    draft = load_draft(settings, folder.path, plain, further)
    adapter = with_live_codec(guessing.adapter, PairCodec(CodecName.parse(settings.kv_codec)))
    loras, lora_bytes = begin_loras(settings, adapter, folder.name)
    return Target(adapter, guessing, choice.tokens, draft, loras, lora_bytes)


def _plain(
    settings: Settings,
    folder: Path,
    further: Mapping[str, Path],
    here: Device,
    joined: Joined | None,
    total: int,
    *,
    sees: bool,
) -> tuple[Adapter, Choice]:
    """The model by itself, and who may guess for it."""
    choice = Choice.parse(settings.speculate, settings.speculate_tokens)
    if joined is not None:
        leading = load_leading(joined, settings, folder, here, total, sees=sees)
        return leading, among_ranks(choice, leading)
    # An EAGLE draft reads hidden states between layers.
    apart = "eagle" in further
    return (
        adapters.load(folder, here, dtype=settings.dtype, widest=settings.prefill_chunk, apart=apart, sees=sees),
        choice,
    )
