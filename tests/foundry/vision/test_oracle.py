"""The vision model in mlx, and our way to write prompts, against transformers with the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foundry import dialect
from foundry.package import MODELS
from foundry.vision.layouts import LAYOUTS, examples
from foundry.vision.prompts import STYLE, TEMPORAL, Manner, Read, lesson, read
from foundry.vision.reader import Reader, cut
from foundry.vision.scenes import Sight

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

FOLDER = MODELS / "vision"
MANNER = Manner(wrapped=True)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(FOLDER)


def inputs(sight: Sight, tokens: list[int], asked: Read) -> dict[str, Any]:
    frames = sight.frames if sight.clip else np.repeat(sight.frames, TEMPORAL, axis=0)
    patches, rows, columns = cut(frames)
    pixels = torch.from_numpy(patches.reshape(-1, patches.shape[-1]))
    grid = [[len(patches), rows, columns]] if sight.clip else [[1, rows, columns]] * len(patches)
    kinds = torch.zeros((1, len(tokens)), dtype=torch.long)
    kinds[0, asked.seen] = 2 if sight.clip else 1
    names = ("pixel_values_videos", "video_grid_thw") if sight.clip else ("pixel_values", "image_grid_thw")
    return {
        "input_ids": torch.tensor([tokens]),
        "mm_token_type_ids": kinds,
        names[0]: pixels,
        names[1]: torch.tensor(grid),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_about_what_is_seen_agree_with_transformers(name: str, oracle: Any, reader: Reader) -> None:
    sight, asked = examples(LAYOUTS[name], 3, held_out=True)
    for _, one in asked:
        found = np.array(reader.logits(reader.see(sight), one))
        with torch.no_grad():
            expected = oracle(**inputs(sight, one.prompt + one.answer, one)).logits[0].numpy()
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.01


def test_what_counts_as_a_right_answer_is_what_transformers_writes(oracle: Any, reader: Reader) -> None:
    for name in ("square", "pair", "clip4"):
        sight, asked = examples(LAYOUTS[name], 5, held_out=True)
        for _, one in asked:
            made = oracle.generate(**inputs(sight, one.prompt, one), max_new_tokens=len(one.answer), do_sample=False)
            written = made[0, len(one.prompt) :].tolist()
            assert (written == one.answer) == reader.answers(reader.see(sight), one)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_processor_that_ships_makes_the_same_prompt_and_the_same_pixels(name: str) -> None:
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    sight, asked = examples(LAYOUTS[name], 3, held_out=True)
    question = asked[0][0]
    count = len(sight.frames)
    text = dialect.prompt(lesson(count, sight.clip, question, MANNER), STYLE)
    processor: Any = AutoProcessor.from_pretrained(FOLDER)
    if sight.clip:
        timing = VideoMetadata(total_num_frames=count, fps=MANNER.rate, frames_indices=list(range(count)))
        made = processor(text=[text], videos=[sight.frames], video_metadata=[timing], return_tensors="pt")
    else:
        made = processor(text=[text], images=list(sight.frames), return_tensors="pt")
    mine = read(sight, question, MANNER)
    expected = inputs(sight, mine.prompt, mine)
    for key, tensor in expected.items():
        torch.testing.assert_close(made[key].to(tensor.dtype), tensor, atol=1e-5, rtol=0)
