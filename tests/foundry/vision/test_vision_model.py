"""The shipped vision model, without torch. Bounds lie well below what its card reports."""

from __future__ import annotations

import json

import jinja2
import numpy as np
import pytest
from safetensors import safe_open

from foundry import vocabulary
from foundry.package import MODELS
from foundry.vision.evaluate import accuracy
from foundry.vision.layouts import LAYOUTS, examples
from foundry.vision.reader import Reader
from foundry.vision.shape import config, image_processor, video_processor

FOLDER = MODELS / "vision"


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return accuracy(Reader(FOLDER), range(3))


def test_it_answers_about_pictures(figures: dict[str, float]) -> None:
    assert figures["pictures"] >= 0.85


def test_it_answers_about_clips(figures: dict[str, float]) -> None:
    assert figures["clips"] >= 0.85


def test_it_ships_with_its_configuration_and_those_of_its_processors() -> None:
    for name, content in (
        ("config", config()),
        ("preprocessor_config", image_processor()),
        ("video_preprocessor_config", video_processor()),
    ):
        assert json.loads((FOLDER / f"{name}.json").read_text()) == content


def test_its_tensors_have_the_names_and_shapes_of_a_published_checkpoint() -> None:
    with safe_open(FOLDER / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    text, vision = config()["text_config"], config()["vision_config"]
    wide = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    assert shapes["model.visual.patch_embed.proj.weight"] == (vision["hidden_size"], 3, 2, 16, 16)
    assert shapes["model.visual.deepstack_merger_list.0.linear_fc2.weight"] == (vision["out_hidden_size"], wide)
    assert shapes["model.language_model.embed_tokens.weight"] == (text["vocab_size"], text["hidden_size"])
    assert {name.split(".")[0] for name in shapes} == {"model"}


def test_its_template_marks_the_places_of_pictures_and_clips() -> None:
    template = (FOLDER / "chat_template.jinja").read_text()
    shown = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "What?"}]
    prompt = jinja2.Template(template).render(messages=[{"role": "user", "content": shown}])
    tokens = vocabulary.encoded(prompt)
    marks = [config()[f"{mark}_token_id"] for mark in ("image", "video")]
    assert [token for token in tokens if token in marks] == marks
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"] == template


def test_marks_of_the_configuration_are_those_of_the_tokenizer() -> None:
    for mark, text in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"), ("vision_start", "<|vision_start|>")):
        assert [config()[f"{mark}_token_id"]] == vocabulary.encoded(text)


def test_what_it_sees_changes_what_it_says() -> None:
    reader = Reader(FOLDER)
    (sight, asked), (other, _) = (examples(LAYOUTS["square"], seed, held_out=True) for seed in (0, 1))
    first, second = (np.array(reader.logits(reader.see(shown), asked[0][1])) for shown in (sight, other))
    assert np.linalg.norm(first - second) > 0.1 * np.linalg.norm(first)
