"""Masks of layers that see only tokens of the same chunk, against each pair of tokens by itself."""

from __future__ import annotations

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, Row
from ingot.kernels.cpu import native
from ingot.models.forward import _is_known_key
from ingot.models.layers.attention_setup import gathers_pages
from ingot.models.layers.decoder import chunk_masks, swap_decoders
from ingot.models.layers.swapping import swap_mixers
from tests.models.layers import family_configs


def batch_of(*parts: tuple[tuple[int, ...], int]) -> MixedBatch:
    """Parts of rows by the tokens that they have stored, each with so many new ones."""
    return MixedBatch(
        tuple(ForwardBatch(tuple(Row(0, ()) for _ in starts), width, starts, starts) for starts, width in parts)
    )


def test_a_token_sees_the_tokens_of_its_chunk_up_to_itself() -> None:
    mixed = batch_of(((3, 9), 1), ((6,), 5))
    masks = chunk_masks(mixed, 4)
    assert masks is not None
    for part, mask in zip(mixed.parts, masks.parts, strict=True):
        end = max(part.starts) + part.width
        seen = [
            [[key <= start + at and key // 4 == (start + at) // 4 for key in range(end)] for at in range(part.width)]
            for start in part.starts
        ]
        assert mask[:, 0].tolist() == seen


def test_within_the_first_chunk_of_all_rows_there_are_no_chunks() -> None:
    assert chunk_masks(batch_of(((3, 7), 1), ((0,), 8)), 8) is None
    assert chunk_masks(batch_of(((3, 8), 1), ((0,), 8)), 8) is not None


def test_steps_of_such_a_model_are_not_compiled_as_their_rows_may_reach_another_chunk() -> None:
    mixed = batch_of(((3, 7), 1))
    chunk_masks(mixed, 8)
    assert not all(map(_is_known_key, mixed.memo))


@pytest.mark.skipif(not native.available(), reason="no native kernels")
def test_pages_of_such_a_model_are_gathered() -> None:
    for family, gathers in (("llama4", True), ("llama4_text", False)):
        model = family_configs.build(family)
        assert swap_decoders(model) == gathers
        swap_mixers(model, unfused=True)
        assert gathers_pages(model, len(model.layers)) == (gathers, gathers)
