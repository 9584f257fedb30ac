"""A head sees what its model sees."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import current_device
from ingot.models.adapter import load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import draft_head_rows, load_mtp_head
from ingot.models.layers.lm_head import token_embedding_of
from ingot.models.vision.tower import VisualInputs


@pytest.mark.parametrize("checkpoint", ["qwen3_5"], indirect=True)
def test_features_stand_where_the_model_had_them_instead_of_tokens(checkpoint: Path) -> None:
    adapter = load_model_adapter(checkpoint, current_device(), dtype="float32", with_vision=True)
    source = find_head(checkpoint, adapter.config)
    assert source is not None
    head = load_mtp_head(source, adapter)
    assert head.sees
    tokens, placeholders = mx.array([[5, 9, 30, 31, 7]]), mx.array([[5, 9, 120, 120, 7]])
    hidden = mx.random.normal((1, 5, head.size), key=mx.random.key(1))
    visual = VisualInputs(mx.array([2, 3]), token_embedding_of(adapter.model)(tokens)[0, 2:4])  # type: ignore[misc]
    found = []
    for inputs, seen in ((tokens, None), (placeholders, visual), (placeholders, None)):
        rows = draft_head_rows(head, adapter)
        with rows.launch([ForwardPart((rows.new(),), 5)], mixed=True) as layers:
            found.append(head(hidden, inputs, layers[0], seen))
        mx.eval(found[-1], rows.pending())
    assert mx.allclose(found[0], found[1], atol=1e-5).item()
    assert not mx.allclose(found[0], found[2], atol=1e-3).item()
