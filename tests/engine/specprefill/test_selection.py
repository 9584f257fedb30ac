"""Which tokens of a prompt are computed."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.engine.specprefill.selection import (
    CHUNK_TOKENS,
    FIRST_TOKENS,
    LAST_TOKENS,
    TOKENS_AROUND_ENDS,
    ScoredPrompt,
    count_selected,
    neighbour_chunks,
    required_tokens,
    select_tokens,
)

LENGTHS = [1, 31, 64, 129, 1000, 4097, 20_000]


def scores(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(length, dtype=np.float32)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("keep", [0.01, 0.1, 0.3, 0.99, 1.0])
def test_what_is_flagged_is_kept_and_of_the_rest_about_the_share(length: int, keep: float) -> None:
    flags = required_tokens(length, [(length // 3, length // 3 + 7)], [length // 2])
    selection = select_tokens(scores(length), flags, keep)
    assert set(np.flatnonzero(flags)) <= set(selection.tolist())
    assert selection.tolist() == sorted(set(selection.tolist())) and selection[0] >= 0 and selection[-1] == length - 1
    assert abs(len(selection) - count_selected(flags, keep)) <= 2 * CHUNK_TOKENS


@pytest.mark.parametrize("length", LENGTHS)
def test_all_of_it_is_all_of_it(length: int) -> None:
    assert select_tokens(scores(length), required_tokens(length), 1.0).tolist() == list(range(length))


def test_the_best_chunks_are_the_ones_that_are_kept() -> None:
    length, good = 4096, [700, 2111, 3333]
    result = 0.01 * scores(length)
    result[good] = 5.0
    selection = set(select_tokens(result, required_tokens(length), 0.05).tolist())
    for position in good:
        begin = position // CHUNK_TOKENS * CHUNK_TOKENS
        assert set(range(begin, begin + CHUNK_TOKENS)) <= selection


def test_a_share_is_never_less_of_what_a_smaller_one_keeps() -> None:
    result, flags = scores(3000), required_tokens(3000)
    smaller: set[int] = set()
    for keep in (0.05, 0.1, 0.3, 0.7, 1.0):
        selection = set(select_tokens(result, flags, keep).tolist())
        assert smaller <= selection
        smaller = selection


def test_the_ends_the_spans_the_borders_and_the_window_are_flagged() -> None:
    flags = required_tokens(2000, [(500, 520)], [900], window=300)
    wanted = {
        *range(FIRST_TOKENS),
        *range(500, 520),
        *range(900 - TOKENS_AROUND_ENDS, 900 + TOKENS_AROUND_ENDS),
        *range(1700, 2000),
    }
    assert set(np.flatnonzero(flags).tolist()) == wanted
    assert (
        required_tokens(1000)[:FIRST_TOKENS].all()
        and required_tokens(1000)[-LAST_TOKENS:].all()
        and not required_tokens(1000)[FIRST_TOKENS:-LAST_TOKENS].any()
    )


def test_spans_beyond_the_prompt_flag_nothing_else() -> None:
    assert required_tokens(300, [(-5, 2), (290, 400)], [0, 300]).sum() == FIRST_TOKENS + LAST_TOKENS


def test_neighbourhoods_widen_with_length_and_come_out_of_the_same_share() -> None:
    assert [neighbour_chunks(length) for length in (4096, 20_000, 50_000, 100_000)] == [0, 1, 2, 4]
    length, best = 20_000, 10_000
    result = 0.001 * scores(length)
    result[best] = 1.0
    selection = set(select_tokens(result, required_tokens(length), 0.01).tolist())
    chunk = best // CHUNK_TOKENS
    assert set(range((chunk - 1) * CHUNK_TOKENS, (chunk + 2) * CHUNK_TOKENS)) <= selection
    assert abs(len(selection) - count_selected(required_tokens(length), 0.01)) <= 2 * CHUNK_TOKENS


def test_equal_scores_are_taken_from_the_front_so_that_the_same_is_always_chosen() -> None:
    flat = np.zeros(2048, np.float32)
    assert (
        select_tokens(flat, required_tokens(2048), 0.1).tolist()
        == select_tokens(flat.copy(), required_tokens(2048), 0.1).tolist()
    )
    assert set(range(FIRST_TOKENS, FIRST_TOKENS + CHUNK_TOKENS)) <= set(
        select_tokens(flat, required_tokens(2048), 0.1).tolist()
    )


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_medium_is_kept_with_all_its_tokens_or_with_none(keep: float, seed: int) -> None:
    length, media = 3000, [(70, 75), (200, 700), (700, 731), (1500, 1601), (2890, 2960)]
    flags = required_tokens(length, [(220, 230)], media=media)
    selection = set(select_tokens(scores(length, seed), flags, keep, media).tolist())
    shares = [len(selection & set(range(begin, end))) for begin, end in media]
    assert all(share in (0, end - begin) for share, (begin, end) in zip(shares, media, strict=True))
    assert shares[1] == 500 and shares[4] == 70, "what is always computed is a part of them"
    assert len(selection) <= count_selected(flags, keep) + 101 + 2 * CHUNK_TOKENS
    assert keep < 1 or len(selection) == length


def test_a_medium_that_scores_best_is_kept_and_one_that_does_not_is_left() -> None:
    length, media = 4096, [(1000, 1300), (2000, 2300)]
    result = 0.5 * scores(length)
    result[1000:1300], result[2000:2300] = 2.0, 0.0
    selection = set(select_tokens(result, required_tokens(length, media=media), 0.2, media).tolist())
    assert set(range(1000, 1300)) <= selection and not selection & set(range(2000, 2300))


def test_a_smaller_share_is_part_of_a_larger_one_also_with_media() -> None:
    result, media = scores(3000), [(400, 900), (1000, 1100)]
    flags = required_tokens(3000, media=media)
    smaller: set[int] = set()
    for keep in (0.05, 0.1, 0.3, 0.7, 1.0):
        selection = set(select_tokens(result, flags, keep, media).tolist())
        assert smaller <= selection
        smaller = selection


def test_a_quality_takes_as_many_of_the_best_as_keep_that_share_of_the_attention() -> None:
    length, mass = 4096, np.zeros(4096, np.float32)
    result, flags = scores(length), required_tokens(length)
    mass[1024:1056], mass[2048:2080], mass[3072:3104] = 6.0, 3.0, 1.0
    result[1024:1056], result[2048:2080], result[3072:3104] = 9.0, 8.0, 7.0
    mass[:10] = 1000.0  # is computed in any case, and so says nothing of what may be left out
    for quality, chunks in ((0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 3)):
        selection = select_tokens(result, flags, 0.3, mass=mass, quality=quality)
        assert len(selection) == flags.sum() + chunks * CHUNK_TOKENS
        kept = ScoredPrompt(result, mass).kept_mass(selection, flags)
        assert kept is not None and kept >= quality - 1e-6


def test_where_nothing_is_attended_to_the_share_decides() -> None:
    result, flags, none = scores(4096), required_tokens(4096), np.zeros(4096, np.float32)
    selection = select_tokens(result, flags, 0.3, mass=none, quality=0.99)
    assert selection.tolist() == select_tokens(result, flags, 0.3).tolist()
    assert ScoredPrompt(result, none).kept_mass(selection, flags) == 1.0
    assert ScoredPrompt(result).kept_mass(selection, flags) is None
