"""The trained head of the shipped hybrid, through ingot's own rows and launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from foundry import mtp_acceptance
from foundry.rows import lesson, written
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import MtpHead, draft_head_rows, load_mtp_head
from tests.engines import GPU

HYBRID = Path(mtp_acceptance.__file__).parent / "models" / "hybrid"


def head_of(adapter: ModelAdapter) -> MtpHead:
    source = find_head(HYBRID, adapter.config)
    assert source is not None
    return load_mtp_head(source, adapter)


def predicted(
    adapter: ModelAdapter, head: MtpHead, tokens: Sequence[int], widths: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """What the model puts next at each place, and what the head had predicted, both computed in chunks."""
    rows, beside = adapter.new_batch_state(), draft_head_rows(head, adapter)
    row, place = rows.new(), beside.new()
    chosen, states = [], []
    begin = 0
    for width in widths:
        logits, hidden = adapter.run(
            rows, mx.array(list(tokens[begin : begin + width])), [ForwardPart((row,), width)], hidden=True
        )
        chosen.append(mx.argmax(logits, axis=-1))
        pairs = min(width, len(tokens) - 1 - begin)
        with beside.launch([ForwardPart((place,), pairs)]) as layers:
            behind = mx.array([list(tokens[begin + 1 : begin + 1 + pairs])])
            states.append(head(hidden[None, :pairs], behind, layers[0]))
        mx.eval(chosen, states, rows.pending(), beside.pending())
        begin += width
    return mx.concatenate(chosen), mx.argmax(head.logits(mx.concatenate(states, axis=1))[0], axis=-1)


@pytest.mark.parametrize(
    ("device", "seeds"),
    [
        pytest.param(None, range(8), id="here"),
        pytest.param(GPU, range(1), id="as-on-a-gpu", marks=pytest.mark.slow),
        pytest.param(None, range(16), id="here, often", marks=pytest.mark.slow),
        pytest.param(GPU, range(8), id="as-on-a-gpu, often", marks=pytest.mark.slow),
    ],
)
def test_the_head_predicts_as_well_as_when_it_is_run_plainly(device: Device | None, seeds: range) -> None:
    adapter = load_model_adapter(HYBRID, device or current_device())
    head = head_of(adapter)
    agreed = count = 0
    for seed in seeds:
        asked, answer = written(lesson(seed, held_out=True), "xml")
        tokens = asked + answer
        first = len(tokens) // 2
        chosen, drafts = predicted(adapter, head, tokens, [first, len(tokens) - first])
        same = drafts[len(asked) - 2 : -1] == chosen[len(asked) - 1 : -1]
        agreed, count = agreed + int(mx.sum(same)), count + same.size
    assert agreed / count >= 0.99
    assert abs(agreed / count - mtp_acceptance.acceptance(HYBRID, "xml", seeds)) < 0.01
