"""The packaged embedding model, against numbers that transformers computed from the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.kernels.device import current_device
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.models.pooling_models.encoder import PoolingEncoder
from ingot.models.pooling_models.loading import load_embedder
from ingot.models.pooling_models.sentence_transformers import NormalizeStep, read_pooling_recipe
from ingot.text.tokenizer.encoder_inputs import TextInputs, load_encoder_vocabulary
from tests.models.pooling_models.running import finished

# text: tokens, the first numbers of its vector, the last ones, and the sum of all
GOLDEN = {
    "A cat sleeps on the sofa.": (
        9, [0.164547, -0.069705, -0.050108, 0.051221, 0.002274, 0.042625], [0.050584, -0.002104], 0.277482
    ),
    "The quarterly earnings rose by four percent.": (
        10, [0.09682, 0.040349, 0.010055, 0.006583, 0.007717, -0.004145], [0.032589, -0.003093], 0.19384
    ),
    " ".join(["Ein langer Satz, der sich wiederholt."] * 12): (
        170, [-0.035845, 0.00312, 0.081663, 0.048677, -0.109035, 0.010406], [0.003695, -0.001653], -0.961975
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_packaged_model("all-minilm-l6-v2", Settings(), no_progress)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PoolingEncoder:
    return load_embedder(folder, current_device(), read_pooling_recipe(folder, usual="mean"))


@pytest.fixture(scope="module")
def inputs(folder: Path) -> TextInputs:
    return TextInputs(load_encoder_vocabulary(folder), length=256)


def test_its_files_are_honoured(folder: Path, encoder: PoolingEncoder) -> None:
    recipe = read_pooling_recipe(folder, usual="mean")
    assert (recipe.pooling, recipe.steps, recipe.length, recipe.notes) == (("mean",), (NormalizeStep(),), 256, ())
    traits = encoder.traits
    assert (traits.family, traits.length, traits.dimension, traits.unit) == ("bert", 256, 384, True)


def test_its_vectors_are_those_of_transformers_also_in_a_padded_batch(
    encoder: PoolingEncoder, inputs: TextInputs
) -> None:
    tokens = [inputs.read(text).tokens for text in GOLDEN]
    for (count, first, last, total), row, vector in zip(
        GOLDEN.values(), tokens, finished(encoder, tokens), strict=True
    ):
        assert len(row) == count
        assert vector[:6] == pytest.approx(first, abs=2e-6) and vector[-2:] == pytest.approx(last, abs=2e-6)
        assert vector.sum() == pytest.approx(total, abs=2e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


def test_texts_that_mean_the_same_are_close_and_others_are_not(encoder: PoolingEncoder, inputs: TextInputs) -> None:
    texts = ["How do I reset my password?", "I forgot my login credentials.", "The recipe needs two eggs."]
    one, two, other = finished(encoder, [inputs.read(text).tokens for text in texts])
    assert one @ two > 0.5 > 0.2 > one @ other
