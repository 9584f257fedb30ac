"""The index over memory and disk: nodes whose records are in either, or in both."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.record_file import RecordOwner
from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner, DiskRecord, PrefixNode, outline_prefixes
from tests.cache.paper import APPEND, BOTH, HYBRID, WINDOW, Paper, index, store

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
NEEDS = pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID, BOTH])
ME = CacheOwner()


def entry(tokens: list[int], begin: int, first: int, *, checkpoint: bool) -> DiskEntry:
    own = array("q", tokens[begin:])
    owner = RecordOwner("", "")
    return DiskEntry(f"{tokens}{begin}", "", owner, "", "", "", (first,), begin, own, False, checkpoint, 1)


class Disk:
    """Takes what `takes` says; what is on it can be lost."""

    def __init__(self, takes: st.DataObject | None = None) -> None:
        self.takes, self.entries = takes, list[DiskEntry]()

    def offload(self, node: PrefixNode) -> bool:
        record = node.record
        assert record is not None
        if node.is_saved:
            return True
        if self.takes is not None and not self.takes.draw(st.booleans()):
            return False
        made = entry(list(node.path_tokens), node.begin, record.oldest(0), checkpoint=record.checkpoint is not None)
        node.disk_record = DiskRecord.whole(made)
        self.entries.append(made)
        return True


def made_of(disk_record: DiskRecord) -> Paper:
    return Paper(disk_record.begin, disk_record.end, disk_record.oldest(0), () if disk_record.has_checkpoint else None)


def promote(held: PrefixIndex, tokens: list[int], limit: int) -> int:
    """Bring back all that a prompt can use; returns the length that this promises."""
    found = held.reach(ME, tokens, limit)
    for node in found.lacking:
        assert node.disk_record is not None and node.is_on_disk
        back = made_of(node.disk_record)
        if node.record is not None:
            back = node.record.without_checkpoint().renewed(back)  # type: ignore[arg-type,assignment]
        held.fill(node, back)  # type: ignore[arg-type]
    return found.length


@NEEDS
@given(data=st.data(), stored=st.lists(TOKENS, max_size=8), asked=TOKENS)
def test_whatever_is_spilled_lost_and_read_back_a_match_is_a_true_prefix(
    needs: ResumeNeeds, data: st.DataObject, stored: list[list[int]], asked: list[int]
) -> None:
    disk = Disk(data)
    held = PrefixIndex(needs, lambda tokens: float(tokens), offload=disk.offload)
    for tokens in stored:
        store(held, tokens, needs)
        held.check()
        most = data.draw(st.integers(0, 600))
        held.shrink(most)
        held.check()
        assert held.nbytes <= most
        for each in disk.entries:
            each.lost = each.lost or data.draw(st.integers(0, 9)) == 0
    wanted = promote(held, asked, len(asked) - 1)
    held.check()
    found = held.match(ME, asked, len(asked) - 1)
    assert found.length == wanted <= found.known
    assert any(tokens[: found.known] == asked[: found.known] for tokens in [*stored, []])
    assert [record.begin for record in found.records] == [0, *(record.end for record in found.records[:-1])][
        : len(found.records)
    ]


@NEEDS
@given(stored=st.lists(TOKENS, min_size=1, max_size=8))
def test_what_a_disk_takes_is_as_good_as_memory(needs: ResumeNeeds, stored: list[list[int]]) -> None:
    disk = Disk()
    held = PrefixIndex(needs, lambda tokens: float(tokens), offload=disk.offload)
    plain = PrefixIndex(needs, lambda tokens: float(tokens))
    for tokens in stored:
        store(held, tokens, needs)
        store(plain, tokens, needs)
        held.shrink(0)
        assert held.nbytes == 0
    for tokens in stored:
        asked = [*tokens, 9]
        assert promote(held, asked, len(tokens)) >= plain.match(ME, asked, len(tokens)).length
        held.check()


@NEEDS
@given(stored=st.lists(TOKENS, min_size=1, max_size=8))
def test_another_process_finds_on_disk_what_this_one_left_there(needs: ResumeNeeds, stored: list[list[int]]) -> None:
    disk = Disk()
    held = PrefixIndex(needs, lambda tokens: float(tokens), offload=disk.offload)
    paths: dict[str, list[int]] = {}
    for tokens in stored:
        store(held, tokens, needs)
        for node in sorted(held.nodes(), key=lambda node: node.end):
            if node.record is not None:
                disk.offload(node)
                assert node.disk_record is not None
                paths.setdefault(node.disk_record.entry.name, list(node.path_tokens))
    fresh = PrefixIndex(needs, lambda tokens: float(tokens))
    left = sorted(disk.entries, key=lambda each: each.begin)
    assert all(fresh.add_disk_entry(ME, paths[each.name], each) for each in left)
    fresh.check()
    assert fresh.nbytes == 0
    for path in paths.values():
        asked = [*path, 9]
        assert fresh.match(ME, asked, len(path)).length == 0
        assert fresh.explain(ME, asked, len(path), "disk").length >= held.match(ME, asked, len(path)).length


def test_what_was_computed_again_is_in_memory_again() -> None:
    disk = Disk()
    held = PrefixIndex(HYBRID, lambda tokens: float(tokens), offload=disk.offload)
    store(held, [1] * 4, HYBRID)
    store(held, [1] * 8, HYBRID)
    held.shrink(0)
    store(held, [1] * 9, HYBRID)
    held.check()
    assert held.resident(ME, [1] * 9) == 9
    assert held.match(ME, [1] * 10, 9).length == 9
    assert held.explain(ME, [1] * 5, 4, "disk").length == 4  # whose checkpoint is on disk still


def test_nodes_whose_files_are_gone_are_forgotten() -> None:
    disk = Disk()
    held = PrefixIndex(APPEND, lambda tokens: float(tokens), offload=disk.offload)
    for first in range(5):
        store(held, [first] * 4, APPEND)
        store(held, [first] * 8, APPEND)
        held.shrink(0)
    for each in disk.entries:
        each.lost = True
    store(held, [9] * 4, APPEND)
    held.shrink(0)
    held.check()
    assert [node.path_tokens for node in held.nodes()] == [(9,) * 4]


def test_a_part_of_a_file_has_what_a_part_of_its_record_would_have() -> None:
    whole = DiskRecord.whole(entry([0] * 10, 4, 6, checkpoint=True))
    upper, lower = whole.split(8)
    assert (upper.oldest(0), lower.oldest(0)) == (6, 8)
    assert (upper.has_checkpoint, lower.has_checkpoint) == (False, True)
    back = DiskRecord.whole(entry([0] * 10, 4, 2, checkpoint=True))
    upper, lower = back.split(8)
    assert (upper.oldest(0), lower.oldest(0)) == (8, 2)


SYSTEM = [1] * 6


def test_the_most_used_come_first_and_behind_what_they_go_on_from() -> None:
    held = index(APPEND)
    for number in range(2, 7):
        store(held, [*SYSTEM, number, number], APPEND, CacheOwner("me"))
    held.match(CacheOwner("me"), [*SYSTEM, 4, 4, 4], 8)
    found = held.outline("me", most=3)
    assert [(node.begin, node.end, parent) for node, parent, _ in found] == [(0, 6, None), (6, 8, 0), (6, 8, 0)]
    assert found[0][0].uses >= found[1][0].uses >= found[2][0].uses
    assert [left_out for _, _, left_out in found] == [3, 0, 0]


def test_nothing_is_told_of_another_tenant() -> None:
    held = index(APPEND)
    store(held, SYSTEM, APPEND, CacheOwner("you"))
    assert held.outline("me", most=3) == []
    assert outline_prefixes([], most=3) == []
