"""How square tiles are arranged to a picture's shape."""

from __future__ import annotations

from functools import lru_cache

from ingot.media.size import Size


@lru_cache(maxsize=256)
def arrangement(size: Size, side: int, tiles: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows whose shape is nearest to the picture's, within so many tiles of this `side`.

    Of equally near ones, the larger as long as the picture fills half of it.
    """
    aspect = size.width / size.height
    best, nearest = (1, 1), float("inf")
    for columns, rows in _arrangements(tiles):
        off = abs(aspect - columns / rows)
        fills = size.area > 0.5 * side * side * columns * rows
        if off < nearest or (off == nearest and fills):
            best, nearest = (columns, rows), off
    return best


@lru_cache(maxsize=16)
def _arrangements(tiles: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    least, most = tiles
    every = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted((each for each in every if each[0] * each[1] >= least), key=lambda each: each[0] * each[1]))
