"""Streams beside a request of many pictures: the tower takes turns with steps, one slice at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.core import GenerationWorkload
from ingot.engine.request import Ended
from ingot.engine.vision_encoder import VisionEncoderRunner
from ingot.media.image_processors import read_processor
from tests.models.vision.looking import prompt_with, saved
from tests.seeing_engines import asked, start_seeing

pytest.importorskip("mlx_vlm")
PICTURES = 16


def test_where_nothing_is_left_of_the_target_each_step_is_followed_by_one_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []  # slices behind each step in which somebody decoded
    step, one_slice = GenerationWorkload._step, VisionEncoderRunner._run_slice

    def stepped(self: GenerationWorkload, *given: object) -> None:
        step(self, *given)  # type: ignore[arg-type]
        if any(sequence.decoding for sequence in self._core.scheduler.running):
            turns.append(0)

    def sliced(self: VisionEncoderRunner, look: object) -> None:
        one_slice(self, look)  # type: ignore[arg-type]
        if turns:
            turns[-1] += 1

    monkeypatch.setattr(GenerationWorkload, "_step", stepped)
    monkeypatch.setattr(VisionEncoderRunner, "_run_slice", sliced)
    folder = saved("qwen3_vl", tmp_path / "model")
    engine = start_seeing(folder, limits=EngineLimits(target_itl_ms=1e-6))
    try:
        stream = engine.generate(asked("stream", [5, 6, 7], [], count=900))
        begun = next(iter(stream))
        shown = engine.generate(asked("shown", *prompt_with(read_processor(folder), 1, ["image"] * PICTURES)))
        events = [event for batch in shown for event in batch]
        engine.cancel("stream")
        assert begun and isinstance(events[-1], Ended)
        assert sum(turns) >= PICTURES and max(turns) == 1
    finally:
        engine.close()
