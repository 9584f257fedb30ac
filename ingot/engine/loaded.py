"""What the engine thread starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.disk import Disk
from ingot.engine.encoder_request import Role
from ingot.engine.hearing.jobs import OfferedHearing
from ingot.engine.kv_events_news import Teller
from ingot.engine.loras import NamedLoras
from ingot.engine.memory_budget import Budget
from ingot.engine.model_card import ModelCard
from ingot.engine.pooling_batches import OfferedEncoder
from ingot.engine.specprefill.prefill import SparseOffer
from ingot.engine.speculation.proposer import Proposer
from ingot.engine.text_to_speech import OfferedSpeech
from ingot.engine.vision_encoder import Eyes
from ingot.media.processor import Processor
from ingot.models.adapter import Adapter
from ingot.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    adapter: Adapter
    tokenizer: Tokenizer
    card: ModelCard
    budget: Budget
    cache_bytes: int = 0  # most that computed prefixes may take
    encoders: Mapping[Role, OfferedEncoder] = field(default_factory=dict)  # further models, for vectors and scores
    folder: Path | None = None  # the model's files
    proposers: Sequence[Proposer] = ()  # who guess tokens ahead, in the order in which they are preferred
    guessed_tokens: int | None = None  # how many they are to guess; None: as many as pays
    processor: Processor | None = None  # how the model is shown pictures and clips; None: it has no vision tower
    eyes: Eyes | None = None  # what it sees them with
    sparse: SparseOffer | None = None  # who scores long prompts of which not all is to be computed
    disk: Disk | None = None  # where computed prefixes are kept beside memory
    codec: PairCodec = RAW_CODEC  # what they are put into
    teller: Teller | None = None  # who tells routers of them
    loras: NamedLoras | None = None  # adapters beside the model, where some may be
    hearing: OfferedHearing | None = None  # a further model, which writes down what is spoken
    speaking: OfferedSpeech | None = None  # a further model, which speaks what is written
