"""Slabs of pages: as many as kernels take, whatever is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.kv_storage import KernelStorage, SlabStorage
from ingot.cache.page_groups import KVStorage, PageGroup, PageIndex, TokenRun
from ingot.cache.pages import PAGE, PageCopy
from ingot.kernels.device import Device
from ingot.kernels.paged_attention.kernels import paged_attention
from ingot.kernels.paged_attention.shapes import SLAB_INPUTS, AttentionShape
from tests.kernels.paged_attention.memory import emulated

MOST = SLAB_INPUTS[-1]


class PaperStorage(KVStorage):
    """Keeps the sizes of its slabs alone."""

    def __init__(self, group: PageGroup, most_slabs: int | None, size: int = 1) -> None:
        super().__init__(group, 1, (size, size), mx.float16)
        self.most_slabs, self.sizes_of_slabs = most_slabs, list[int]()

    @property
    def nbytes(self) -> int:
        self.provide()
        return sum(self.sizes_of_slabs) * PAGE * self.token_bytes

    def provide(self) -> None:
        self.sizes_of_slabs += self._group.slabs[len(self.sizes_of_slabs) :]
        assert self.sizes_of_slabs == self._group.slabs

    def join(self, first: int) -> None:
        self.provide()
        self.sizes_of_slabs[first : first + 2] = [sum(self.sizes_of_slabs[first : first + 2])]

    def trim(self) -> None:
        del self.sizes_of_slabs[len(self._group.slabs) :]

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        raise NotImplementedError

    @classmethod
    def copy_all(cls, storages: Sequence[KVStorage], copies: Sequence[PageCopy]) -> None:
        raise NotImplementedError

    def whole_pages(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        raise NotImplementedError

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        raise NotImplementedError

    def pending(self) -> list[mx.array]:
        return []


class Budgeted:
    """Groups that share a budget, as `Rows` provides for them."""

    def __init__(self, most_slabs: int | None, most: int | None, sizes: Sequence[int]) -> None:
        self.most = most
        self.groups = [PageGroup(number, None, 4 * size) for number, size in enumerate(sizes)]
        self.storages = [PaperStorage(group, most_slabs, size) for group, size in zip(self.groups, sizes, strict=True)]

    @property
    def stored(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    @property
    def held(self) -> int:
        return sum(group.pages.used * group.page_bytes for group in self.groups)

    def grow(self, number: int, pages: int) -> bool:
        """Take so many, as far as they fit."""
        group = self.groups[number]
        if self.most is not None:
            pages = min(pages, (self.most - self.held) // group.page_bytes)
        for _ in range(pages):
            group.pages.take()
        if not group.provided:
            group.provide(self.most, 0 if self.most is None else self.most - self.stored)
        return pages > 0

    def shrink(self, number: int, pages: int) -> None:
        group = self.groups[number]
        free = set(group.pages.free)
        held = [page for page in range(group.pages.made) if page not in free]
        group.pages.drop(held[len(held) - min(pages, len(held)) :], cached=False)
        group.trim()

    def check(self, most_slabs: int) -> None:
        for group, storage in zip(self.groups, self.storages, strict=True):
            assert len(group.slabs) <= most_slabs
            assert group.provided and sum(group.slabs) >= group.pages.made
            storage.provide()
            assert all(group.slab_of(page)[1] < group.slabs[group.slab_of(page)[0]] for page in range(group.pages.made))


steps = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 3, 40, 300]), st.integers(0, 7)), min_size=1, max_size=30
)


@given(st.one_of(st.none(), st.integers(30, 3000)), st.tuples(st.integers(1, 3), st.integers(1, 9)), steps)
def test_whatever_grows_and_shrinks_lies_in_as_many_slabs_as_kernels_take(
    most: int | None, sizes: tuple[int, int], steps: list[tuple[int, int, int]]
) -> None:
    states = Budgeted(MOST, None if most is None else most * 4 * PAGE, sizes)
    for number in (0, 1):
        states.grow(number, 1)
    for number, pages, seldom in steps:
        if seldom == 0:
            states.shrink(number, pages)
        for _ in range(pages):
            states.grow(number, 1)
        states.check(MOST)


@pytest.mark.parametrize("most_slabs", [MOST, None])
@pytest.mark.parametrize("most", [100, 5400, 20_000])
def test_a_budget_is_reached_page_by_page_and_never_exceeded(most: int, most_slabs: int | None) -> None:
    states = Budgeted(most_slabs, most * 4 * PAGE, [1])
    while states.grow(0, 1):
        assert states.stored <= most * 4 * PAGE
    assert states.groups[0].pages.used == most
    assert len(states.groups[0].slabs) <= (most_slabs or 40)


def test_what_others_have_taken_ahead_costs_no_more_than_a_few_slabs() -> None:
    states = Budgeted(None, 10_000 * 4 * PAGE, [1, 1])
    states.grow(1, 5000)
    while states.grow(0, 1):
        pass
    assert sum(group.pages.used for group in states.groups) == 10_000
    assert len(states.groups[0].slabs) < 400
    assert states.stored <= 1.02 * 10_000 * 4 * PAGE


@pytest.mark.parametrize("most_slabs", [MOST, None])
def test_without_a_budget_no_more_than_a_quarter_is_taken_ahead(most_slabs: int | None) -> None:
    states = Budgeted(most_slabs, None, [1])
    for _ in range(20_000):
        states.grow(0, 1)
        assert sum(states.groups[0].slabs) <= states.groups[0].pages.made * 1.25 + 4


@emulated
@pytest.mark.parametrize("kind", ["metal", "cuda", "plain"])
def test_what_was_written_stays_where_it_was_while_slabs_are_added_and_joined(kind: str) -> None:
    group, shape = PageGroup(0, None), AttentionShape(2, 2, 16, 32)
    storage = _storage(kind, group, shape)
    keys, values = mx.random.normal((40, 2, 16)), mx.random.normal((40, 2, 32))
    for page in range(40):
        group.pages.take()
        if not group.provided:
            group.provide(most=40 * PAGE * storage.token_bytes, left=0)
        storage.write(keys[page : page + 1], values[page : page + 1], [(0, 1, page, page)])
    assert len(group.slabs) == (MOST if kind == "metal" else 40)
    found = storage.gathered(group.index(range(40)))
    for wanted, gathered in zip((keys, values), found, strict=True):
        lie = gathered.reshape(2, 40, PAGE, -1)
        assert all(mx.array_equal(lie[:, page, page], wanted[page]).item() for page in range(40))


def _storage(kind: str, group: PageGroup, shape: AttentionShape) -> SlabStorage:
    sizes = (shape.key_size, shape.value_size)
    if kind == "plain":
        return SlabStorage(group, shape.kv_heads, sizes, mx.float32)
    kernel = paged_attention(Device(kind, "a GPU", 1), shape, mx.float32, scale=1.0)  # type: ignore[arg-type]
    return KernelStorage(group, shape.kv_heads, sizes, mx.float32, kernel, kernel)
