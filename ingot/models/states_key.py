"""What computed states depend on, in words: who has another one of these can do nothing with them."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from ingot.cache.attention_state import AppendState, parts_of
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import VERSION
from ingot.cache.pages import PAGE
from ingot.models.adapter import Adapter
from ingot.models.cache_key import model_digest, remembered_digest, tokenizer_digest
from ingot.models.live_states import live_states


def states_key(adapter: Adapter, folder: Path, codec: PairCodec) -> dict[str, str]:
    return {
        "model": model_digest(folder),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live(adapter),
    }


def exact_key(
    adapter: Adapter,
    folder: Path,
    codec: PairCodec,
    digests: Path,
    secret: bytes,
    *,
    deterministic: bool,
    part: str = "",
) -> dict[str, str]:
    """The same, for states that are to be the very ones that this server would compute. `digests` is a file that
    remembers what models' files were found to be, sealed with `secret`; `part` says which of the states these are, of
    several ranks'."""
    return {
        "model": remembered_digest(folder, digests, secret),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live(adapter),
        "states": str(adapter.formats),
        "layout": _layout(adapter),
        "head": "none" if adapter.head is None else f"{adapter.head.name}, {adapter.head.weight_bytes} bytes",
        "device": adapter.device.kind,
        "deterministic": str(deterministic).lower(),
        **({"part": part} if part else {}),
    }


def _live(adapter: Adapter) -> dict[str, str]:
    """What states were computed from, and may lie in, where that is not the very ones before them."""
    return {} if adapter.live is None else {"live codec": f"{adapter.live.described}, pages {VERSION} of {PAGE}"}


def _layout(adapter: Adapter) -> str:
    """The layers' kinds, in order."""
    layers = live_states(adapter.model, adapter.margin, adapter.kept, adapter.kernels)
    beside = [] if adapter.head is None else live_states(adapter.head, 0, adapter.kept, adapter.kernels)
    kinds = (
        f"{state.kind}({state.window})" if isinstance(state, AppendState) and state.window else state.kind
        for state in parts_of((*layers, *beside))
    )
    return " ".join(f"{kind}*{len(list(run))}" for kind, run in groupby(kinds))
