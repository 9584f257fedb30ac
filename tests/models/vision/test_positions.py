"""Where tokens stand, against transformers' own walk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingot.models.vision.positions import contiguous, interleaved, three_axes
from tests.media.seeing import TIMED, UNTIMED
from tests.models.vision.looking import IMAGE, VIDEO, prompt_with


def test_a_picture_spans_rows_and_columns_and_text_goes_on_behind_the_longer_side() -> None:
    tokens, (item,) = prompt_with(TIMED, 1, ["image"])
    rows, columns = item.grid.h // 2, item.grid.w // 2
    found = three_axes(len(tokens), [item], 2)
    own = found[:, item.begin : item.end] - item.begin
    assert (own[0] == 0).all()
    assert own[1].tolist() == [row for row in range(rows) for _ in range(columns)]
    assert own[2].tolist() == list(range(columns)) * rows
    assert (found[:, item.end] == item.begin + max(rows, columns)).all()


def test_a_run_that_is_not_as_long_as_its_grid_says_is_no_prompt() -> None:
    tokens, (item,) = prompt_with(TIMED, 1, ["image"])
    with pytest.raises(ValueError, match="does not show a grid"):
        three_axes(len(tokens), [item], 1)


def test_axes_take_turns_or_follow_each_other() -> None:
    assert interleaved([3, 2, 2]) == (0, 1, 2, 0, 1, 2, 0)
    assert interleaved([24, 20, 20])[57:] == (0, 1, 2, 0, 0, 0, 0)
    assert contiguous([3, 2, 2]) == (0, 0, 0, 1, 1, 2, 2)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_transformers_for_random_mixes(family: str) -> None:
    torch = pytest.importorskip("torch")
    walk = _walk(family)
    processor, pace = (TIMED, None) if family.startswith("qwen3") else (UNTIMED, 2.0 if "5" in family else None)
    random = np.random.default_rng(7)
    for seed in range(200):
        shown = [str(kind) for kind in random.choice(["image", "video"], size=int(random.integers(1, 5)))]
        tokens, items = prompt_with(processor, seed, shown)
        grids = {kind: [list(item.grid) for item in items if item.kind == kind] for kind in ("image", "video")}
        kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in tokens]
        intervals = [item.layout.interval for item in items if item.kind == "video"]
        expected, deltas = walk(
            torch.tensor([tokens]),
            mm_token_type_ids=torch.tensor([kinds]),
            image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
            video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
            **({"second_per_grid_ts": torch.tensor(intervals)} if pace and intervals else {}),
        )
        found = three_axes(len(tokens), items, 2, pace)
        assert (found == expected[:, 0].numpy()).all()
        assert found.max() + 1 - len(tokens) == deltas.item()


def _walk(family: str) -> Any:
    """transformers' own, without a model around it."""
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[family]
    model = getattr(module, f"{name}Model")
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    alone = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    alone.get_vision_position_ids = lambda *given, **named: model.get_vision_position_ids(alone, *given, **named)
    return lambda *given, **named: model.get_rope_index(alone, *given, **named)
