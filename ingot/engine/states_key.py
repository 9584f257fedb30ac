"""What computed states depend on, in words: who has another one of these can do nothing with them."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.layers import AppendState
from ingot.cache.page_form import VERSION
from ingot.cache.pages import PAGE
from ingot.cache.rows import Rows
from ingot.models.adapter import Adapter
from ingot.models.files.digest import model_digest, remembered_digest, tokenizer_digest


def states_key(adapter: Adapter, folder: Path, codec: PairCodec) -> dict[str, str]:
    return {
        "model": model_digest(folder),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live(adapter),
    }


def exact_key(
    adapter: Adapter, folder: Path, codec: PairCodec, digests: Path, *, deterministic: bool
) -> dict[str, str]:
    """The same, for states that are to be the very ones that this server would compute. `digests` is a file that
    remembers what models' files were found to be."""
    return {
        "model": remembered_digest(folder, digests),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live(adapter),
        "states": str(adapter.formats),
        "layout": _layout(adapter.new_rows()),
        "head": "none" if adapter.head is None else f"{adapter.head.name}, {adapter.head.weight_bytes} bytes",
        "device": adapter.device.kind,
        "deterministic": str(deterministic).lower(),
    }


def _live(adapter: Adapter) -> dict[str, str]:
    """What states were computed from, and may lie in, where that is not the very ones before them."""
    return {} if adapter.live is None else {"live codec": f"{adapter.live.described}, pages {VERSION} of {PAGE}"}


def _layout(rows: Rows) -> str:
    """The layers' kinds, in order."""
    kinds = (
        f"{state.kind}({state.window})" if isinstance(state, AppendState) and state.window else state.kind
        for state in rows.states
    )
    return " ".join(f"{kind}*{len(list(run))}" for kind, run in groupby(kinds))
