"""Which proposers a model has when it is loaded."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from ingot.engine.speculation.options import Choice
from ingot.engine.start_proposers import offer_proposers
from ingot.errors import ModelError
from tests import tiny
from tests.models.draft_heads.making import write


def test_a_head_that_is_not_known_is_named_by_a_note_and_to_who_asks_for_it_by_an_error(tmp_path: Path) -> None:
    adapter = tiny.adapter("llama")
    folder = write(tmp_path / "m", {}, files={"model.safetensors": {"model.mtp.layers.0.eh_proj.weight": mx.ones(4)}})
    offered = offer_proposers(Choice.parse("auto"), folder, adapter, {}, dtype=None)
    [note] = offered.notes
    assert offered.names == ("forced", "lookup") and "eh_proj" in note and "llama" in note
    with pytest.raises(ModelError, match=r"eh_proj.* llama"):
        offer_proposers(Choice.parse("mtp"), folder, adapter, {}, dtype=None)
