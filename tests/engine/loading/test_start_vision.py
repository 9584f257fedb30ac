"""What a model sees with is tried before anybody asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config import Settings
from ingot.engine.start_vision import Vision
from ingot.errors import ModelError
from ingot.media.layout import Layout, PictureWish
from ingot.media.size import Size
from tests.fake_tower import LAYOUT, SLICES, FakeTower


class Squares:
    """A processor that shows everything alike."""

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        return LAYOUT


def test_a_tower_is_run_at_load_so_that_nothing_is_compiled_while_streams_run() -> None:
    tower = FakeTower()
    eyes = Vision(Squares(), sees=True).eyes(tower, 1 << 20)  # type: ignore[arg-type]
    assert eyes is not None and eyes.tower is tower
    assert len(tower.sliced) == SLICES


def test_a_slow_tower_is_tried_for_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = FakeTower(slice_s=6.0)
    monkeypatch.setattr("ingot.models.vision.rehearsal.time.process_time", lambda: tower.now)
    Vision(Squares(), sees=True).eyes(tower, 1 << 20)  # type: ignore[arg-type]
    assert len(tower.sliced) == 2


@pytest.mark.parametrize("family", ["phi4mm", "phi4_multimodal"])
def test_a_family_that_nothing_can_be_done_for_is_refused_by_name(family: str, tmp_path: Path) -> None:
    for settings in (Settings(), Settings(text_only=True)):
        with pytest.raises(ModelError, match="Phi 4 multimodal is not served"):
            Vision.of(tmp_path, {"model_type": family}, settings)
