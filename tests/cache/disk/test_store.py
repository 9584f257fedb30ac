"""Records in a folder: bit for bit what was written, or a miss, whatever happens to the files."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ingot.cache.disk.index import MOST_SIBLINGS, IndexRow, RecordIndex, RecordTotal
from ingot.cache.disk.record_file import (
    DamagedRecord,
    FileSystem,
    ListedFile,
    RecordOwner,
    hex_digest,
    tensor_checksums,
)
from ingot.cache.disk.store import IDLE_S, INDEX_GROWTH, INDEX_ROOM, DiskLimits, NoDiskRoom, RecordStore
from tests.cache.disk.records import KEY, ME, FaultyFiles, bytes_in, is_right, opened, record

SHORT = [1, 2, 3]
LONG = [1, 2, 3, 4, 5, 6]


def one_file(folder: Path) -> Path:
    (found,) = folder.glob("*/*.safetensors")
    return found


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first, data = record(SHORT)
    store.write(first, data)
    second, more = record(LONG, 3, checkpoint=True)
    store.write(second, more)
    store.close()
    again = opened(tmp_path)
    found = again.entries(ME)
    assert [(entry.begin, entry.end, entry.before, entry.checkpoint) for entry in found] == [
        (0, 3, hex_digest([]), False),
        (3, 6, first.path, True),
    ]
    assert all(is_right(again.read(entry)) for entry in found)
    assert again.entries(RecordOwner.of("you", "")) == []


def test_a_file_is_a_safetensors_file_of_this_user_alone(tmp_path: Path) -> None:
    from safetensors import safe_open

    header, data = record(SHORT)
    opened(tmp_path / "new").write(header, data)
    path = one_file(tmp_path / "new")
    with safe_open(path, framework="numpy") as held:
        assert held.get_tensor("0").tobytes() == data[0]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in (tmp_path / "new").rglob("*"):
        if file.is_file():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_neither_tenants_nor_salts_can_be_read_in_a_folder(tmp_path: Path) -> None:
    header, data = record(SHORT, owner=RecordOwner.of("a-tenant", "some-salt"))
    opened(tmp_path).write(header, data)
    everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"a-tenant" not in everything and b"some-salt" not in everything


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_bit_can_flip_unnoticed(place: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = opened(Path(folder))
        header, data = record(SHORT, checkpoint=True)
        entry = store.write(header, data)
        path = one_file(Path(folder))
        raw = bytearray(path.read_bytes())
        raw[int(place * len(raw))] ^= 1 << bit
        path.write_bytes(raw)
        with pytest.raises(DamagedRecord):
            store.read(entry)
        assert entry.lost and not path.exists()
        assert (Path(folder) / "damaged" / path.name).exists()
        assert opened(Path(folder)).entries(ME) == []


@given(length=st.floats(0, 1, exclude_max=True), indexed=st.booleans())
def test_a_file_that_was_cut_short_is_a_miss_for_whoever_knew_it_and_for_the_next(length: float, indexed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = opened(Path(folder))
        header, data = record(SHORT)
        entry = store.write(header, data)
        path = one_file(Path(folder))
        path.write_bytes(path.read_bytes()[: int(length * path.stat().st_size)])
        if not indexed:
            store.close()
            for file in Path(folder).glob("index.sqlite*"):
                file.unlink()
        assert opened(Path(folder)).entries(ME) == []
        with pytest.raises((DamagedRecord, OSError)):
            store.read(entry)


def test_a_record_under_anothers_name_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (mine, data), (other, more) = record(SHORT), record(LONG)
    entry = store.write(mine, data)
    store.write(other, more)
    home = tmp_path / store.scope
    (home / other.name).replace(home / mine.name)
    with pytest.raises(DamagedRecord):
        store.read(entry)


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    header, data = record(SHORT)
    entry = store.write(header, data)
    one_file(tmp_path).unlink()
    with pytest.raises(FileNotFoundError):
        store.read(entry)
    assert entry.lost and store.entries(ME) == []


INDEX_DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "no database": lambda path: path.write_bytes(b"nothing" * 1000),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "of another version": lambda path: sqlite3.connect(path, isolation_level=None).execute("PRAGMA user_version = 9"),
    "lying": lambda path: sqlite3.connect(path, isolation_level=None).execute("UPDATE records SET facts = x'00'"),
    "empty": lambda path: sqlite3.connect(path, isolation_level=None).execute("DELETE FROM records"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_can_be_lost_in_any_way(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    for tokens in (SHORT, LONG):
        store.write(*record(tokens))
    store.close()
    INDEX_DAMAGE[damage](tmp_path / "index.sqlite")
    again = opened(tmp_path)
    assert sorted(entry.end for entry in again.entries(ME)) == [3, 6]
    assert all(is_right(again.read(entry)) for entry in again.entries(ME))
    again.write(*record([7, 8]))
    again.close()
    assert len(opened(tmp_path).entries(ME)) == 3


INDEX_STEPS = st.lists(
    st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from("pq"), st.integers(0, 9)),
    max_size=20,
)


@given(steps=INDEX_STEPS)
@example(steps=[(True, "a", "x", "p", 3), (True, "a", "x", "p", 3)])
@example(steps=[(True, "a", "x", "p", 3), (True, "a", "x", "q", 5)])
def test_an_index_counts_right_whatever_is_added_again_or_removed(steps: list[tuple[bool, str, str, str, int]]) -> None:
    index = RecordIndex(None)
    held: dict[tuple[str, str], tuple[str, int]] = {}
    for adds, scope, name, tenant, size in steps:
        if adds:
            index.add([IndexRow(scope, name, size, 1.0, 0, b"", tenant)])
            held[scope, name] = tenant, size
        else:
            index.remove(scope, [name])
            held.pop((scope, name), None)
    sizes = {tenant: [size for whose, size in held.values() if whose == tenant] for tenant, _ in held.values()}
    assert index.totals() == {tenant: RecordTotal(len(each), sum(each)) for tenant, each in sizes.items()}
    index.close()


def test_an_index_that_breaks_while_it_is_used_is_made_anew(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(*record(SHORT))
    for file in tmp_path.glob("index.sqlite*"):
        file.write_bytes(b"x" * 9000)
    store.write(*record(LONG))
    store.close()
    assert len(opened(tmp_path).entries(ME)) == 2


FAULTS = st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, "short", None, None, None])


@given(
    schedule=st.lists(FAULTS, max_size=60),
    writes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans()), max_size=12),
    most=st.sampled_from([1_300_000, 1_500_000, 1 << 26]),
)
@example(schedule=["short"] * 60, writes=[(0, 50, True)], most=1 << 26)
def test_whatever_fails_when_what_is_read_is_what_was_written_and_the_cap_holds(
    schedule: list[int | str | None], writes: list[tuple[int, int, bool]], most: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rest = iter(schedule)
        files = FaultyFiles()
        store = opened(folder, DiskLimits(most, sync=len(writes) == 1), files)
        files.fault = lambda call: next(rest, None)
        for first, length, checkpoint in writes:
            try:
                entry = store.write(*record([first] * length, checkpoint=checkpoint))
                assert is_right(store.read(entry))
            except (OSError, DamagedRecord):
                pass
            assert bytes_in(folder) <= most
        files.fault = lambda call: None
        again = opened(folder, DiskLimits(most, sync=False))
        assert all(is_right(again.read(entry)) for entry in again.entries(ME))
        assert not list(folder.glob("*/*.part"))
        again.write(*record([9, 9]))


@settings(max_examples=15)
@given(room=st.integers(0, 200_000))
def test_a_drive_that_is_full_loses_the_new_record_and_no_other(room: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = FaultyFiles()
        store = opened(Path(folder), files=files)
        entry = store.write(*record(SHORT))
        files.room = room
        with pytest.raises(OSError):
            store.write(*record([4] * 100))
        assert is_right(store.read(entry))
        assert not list(Path(folder).glob("*/.*"))


def test_the_least_used_go_and_of_a_path_its_end_before_its_beginning(tmp_path: Path) -> None:
    now = [0.0]
    store = opened(tmp_path, DiskLimits(5_000_000, sync=False))
    store._clock = lambda: now[0]
    written = []
    for number in range(3):
        now[0] += 1
        path = [number] * 400
        written.append(store.write(*record(path[:200])))
        written.append(store.write(*record(path, 200)))
    now[0] += 1
    store.touch(written[0:2])
    for number in range(3, 9):
        now[0] += 1
        store.write(*record([number] * 200))
        lost = [entry.lost for entry in written]
        assert lost.index(False) == 0 or all(lost[:2])
        for head, tail in ((0, 1), (2, 3), (4, 5)):
            assert lost[tail] or not lost[head]
    assert written[2].lost and written[3].lost


def test_a_cap_that_was_lowered_holds_from_the_start(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(20):
        store.write(*record([number] * 100))
    store.close()
    assert bytes_in(tmp_path) > 4_000_000
    again = opened(tmp_path, DiskLimits(3_000_000))
    assert 0 < len(again.entries(ME)) < 20
    assert bytes_in(tmp_path) <= 3_000_000


def test_foreign_files_count_and_stay(tmp_path: Path) -> None:
    foreign = [tmp_path / "somebody's", tmp_path / "a folder" / ("0" * 32 + "-" + "0" * 8 + ".safetensors")]
    foreign[1].parent.mkdir()
    for file in foreign:
        file.write_bytes(b"x" * 600_000)
    store = opened(tmp_path, DiskLimits(4_000_000, sync=False))
    for number in range(12):
        store.write(*record([number] * 200))
        assert bytes_in(tmp_path) <= 4_000_000
    assert 0 < len(store.entries(ME)) < 12
    assert all(file.stat().st_size == 600_000 for file in foreign)


def test_records_of_another_scope_give_way_when_they_were_used_longest_ago(tmp_path: Path) -> None:
    other = opened(tmp_path, model="another")
    key = KEY | {"model": "another"}
    theirs = [other.write(*record([number] * 300, key=key)) for number in range(3)]
    store = opened(tmp_path, DiskLimits(4_000_000, sync=False))
    mine = store.write(*record([1] * 200))
    other.touch(theirs[:1])
    other.settle()
    for number in range(2, 6):
        store.touch([mine])
        store.write(*record([number] * 200))
        assert bytes_in(tmp_path) <= 4_000_000
    files = {file.name for file in tmp_path.glob("*/*.safetensors")}
    assert [entry.name in files for entry in theirs] == [True, False, False]
    assert len(store.entries(ME)) == 5 and not mine.lost
    assert store.folder_bytes() == bytes_in(tmp_path)
    other.write(*record([9], key=key))
    assert [entry.lost for entry in theirs] == [False, True, True]  # as it learns then


def test_a_scope_that_nobody_serves_any_more_makes_room_without_its_index(tmp_path: Path) -> None:
    other = opened(tmp_path, model="another")
    for number in range(4):
        other.write(*record([number] * 300, key=KEY | {"model": "another"}))
    other.close()
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    store = opened(tmp_path, DiskLimits(3_800_000, sync=False))
    for number in range(6):
        store.write(*record([number] * 200))
        assert bytes_in(tmp_path) <= 3_800_000
    assert len(list((tmp_path / other.scope).glob("*.safetensors"))) == 0 and len(store.entries(ME)) == 6
    again = opened(tmp_path, model="another")
    assert list(again.entries(ME)) == []


def test_what_another_scope_left_is_still_found_by_its_own_server(tmp_path: Path) -> None:
    other = opened(tmp_path, model="another")
    left = other.write(*record(LONG, key=KEY | {"model": "another"}, checkpoint=True))
    other.close()
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    opened(tmp_path).close()  # which knows of it what the file system says
    again = opened(tmp_path, model="another")
    (found,) = again.entries(ME)
    assert found.name == left.name and is_right(again.read(found))


class CountingFiles(FileSystem):
    """Knows how many files it has listed, and how many headers it has read."""

    def __init__(self) -> None:
        self.listed_files = self.reads = 0

    def within(self, folder: Path) -> tuple[list[Path], list[ListedFile]]:
        found = super().within(folder)
        self.listed_files += len(found[0]) + len(found[1])
        return found

    def read(self, path: Path, most: int | None = None) -> memoryview:
        self.reads += 1
        return super().read(path, most)


@pytest.mark.parametrize("records", [4, 60])
def test_a_write_takes_the_same_work_however_many_records_there_are(tmp_path: Path, records: int) -> None:
    files = CountingFiles()
    here, there = opened(tmp_path, files=files), opened(tmp_path)
    for number in range(records):
        here.write(*record([number + 10]))
    files.listed_files = files.reads = 0
    here.write(*record([1]))
    there.write(*record([2]))
    here.write(*record([3]))  # and learns what the other one wrote, without listing or reading anything
    assert len(here.entries(ME)) == records + 3
    assert files.listed_files <= 2 * len(list(tmp_path.iterdir())) and files.reads == 0


YOU = RecordOwner.of("you", "")


def of_both(store: RecordStore) -> tuple[int, int]:
    return len(store.entries(ME)), len(store.entries(YOU))


@pytest.mark.parametrize("models", [["abc"], ["abc", "another"]])
def test_one_tenants_records_remove_none_of_anothers_share_whatever_model_they_are_of(
    tmp_path: Path, models: list[str]
) -> None:
    store = opened(tmp_path, DiskLimits(4_000_000, sync=False))
    mine = [store.write(*record([number] * 100)) for number in range(6)]  # 1.2 of 3 million bytes
    greedy = [opened(tmp_path, DiskLimits(4_000_000, sync=False), model=model) for model in models]
    for number in range(40):
        for model, writing in zip(models, greedy, strict=True):
            writing.write(*record([number] * 100, owner=YOU, key=KEY | {"model": model}))
            assert bytes_in(tmp_path) <= 4_000_000
    store.write(*record([7] * 100))
    assert not any(entry.lost for entry in mine)
    assert sum(len(writing.entries(YOU)) for writing in greedy) >= 5


def test_what_was_lent_of_a_share_is_given_back_when_its_tenant_writes(tmp_path: Path) -> None:
    store = opened(tmp_path, DiskLimits(4_000_000, sync=False))
    for number in range(40):
        store.write(*record([number] * 100, owner=YOU))
    lent = len(store.entries(YOU))
    for number in range(40):
        store.write(*record([number] * 100))
    mine, yours = of_both(store)
    assert lent >= 12 and abs(mine - yours) <= 1 and mine + yours >= lent - 1


def test_the_share_of_a_tenant_that_used_nothing_for_a_day_is_lent_as_a_whole(tmp_path: Path) -> None:
    now = [1e6]
    store = opened(tmp_path, DiskLimits(4_000_000, sync=False))
    store._clock = lambda: now[0]
    for number in range(6):
        store.write(*record([number] * 100))
    now[0] += IDLE_S + 1
    for number in range(40):
        store.write(*record([number] * 100, owner=YOU))
    assert of_both(store)[0] == 0


def test_whose_records_are_is_known_without_the_index_of_other_models_too(tmp_path: Path) -> None:
    other = opened(tmp_path, model="another")
    for owner in (ME, YOU):
        other.write(*record([1] * 100, owner=owner, key=KEY | {"model": "another"}))
    other.close()
    opened(tmp_path).close()
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    store = opened(tmp_path)
    totals: dict[str, RecordTotal] = store._index.read(lambda index: index.totals(), dict)
    assert {tenant: total.records for tenant, total in totals.items()} == {ME.tenant: 1, YOU.tenant: 1}


@pytest.mark.parametrize("records", [12, 120])
def test_making_room_looks_at_what_goes_and_the_next_of_each_tenant(
    tmp_path: Path, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    for number in range(records):
        store.write(*record([number] * 4, owner=ME if number % 2 else YOU))
    looked = [0]
    least_used = RecordIndex.least_used

    def counted(index: RecordIndex, tenant: str) -> Iterator[IndexRow]:
        for row in least_used(index, tenant):
            looked[0] += 1
            yield row

    monkeypatch.setattr(RecordIndex, "least_used", counted)
    used = store._counted()
    store.limits = DiskLimits(used.others + max(INDEX_ROOM, used.indexed + INDEX_GROWTH), sync=False)
    store.write(*record([1] * 16))
    gone = records + 1 - sum(of_both(store))
    assert 0 < gone < records and looked[0] <= gone + 2


def test_files_that_come_or_go_without_the_lock_are_counted_before_the_next_write(tmp_path: Path) -> None:
    store = opened(tmp_path, DiskLimits(3_000_000, sync=False))
    entries = [store.write(*record([number] * 100)) for number in range(4)]
    home = tmp_path / store.scope
    (home / entries[0].name).unlink()
    (home / "somebody's").write_bytes(b"x" * 1_000_000)
    store.write(*record([9] * 100))
    assert entries[0].lost and bytes_in(tmp_path) <= 3_000_000
    assert store.folder_bytes() == bytes_in(tmp_path)


def test_what_a_killed_process_left_is_cleared_away_by_the_next_writer_of_any_scope(tmp_path: Path) -> None:
    here, there = opened(tmp_path), opened(tmp_path, model="another")
    part = tmp_path / there.scope / f".{record(SHORT)[0].name}.part"
    foreign = tmp_path / there.scope / "somebody's.part"
    for file in (part, foreign):
        file.write_bytes(b"x" * 1000)
    here.write(*record(SHORT))
    assert not part.exists() and foreign.exists()


def test_an_index_that_lies_about_a_record_is_not_believed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(*record(SHORT))
    store.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as lying:
        (facts,) = lying.execute("SELECT facts FROM records").fetchone()
        lying.execute("UPDATE records SET facts = ?", (facts.replace(b"[1, 2, 3]", b"[1, 2, 4]"),))
    again = opened(tmp_path)
    (entry,) = again.entries(ME)
    with pytest.raises(DamagedRecord, match="index"):
        again.read(entry)
    assert entry.lost and one_file(tmp_path).parent.name == again.scope
    (found,) = opened(tmp_path).entries(ME)
    assert found.tokens.tolist() == SHORT


def test_records_along_a_prompt_are_found_without_looking_at_others(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = store.write(*record([1] * 8))
    header, data = record([1] * 5 + [2] * 5, 5)
    amid = store.write(replace(header, within=first.identity), data)
    last = store.write(*record([1] * 5 + [2] * 5 + [3] * 5, 10))
    elsewhere = [store.write(*record([1] * 5 + [4], 5)), store.write(*record([6] * 3))]
    store.write(*record([1] * 8, owner=RecordOwner.of("you", "")))
    found = list(store.along(ME, [1] * 5 + [2] * 5 + [3]))
    assert found == [(first, None), (amid, first), (last, amid)]
    assert list(store.along(ME, [1] * 5)) == [(first, None)] and list(store.along(ME, [])) == []
    assert [entry for entry, _ in store.along(ME, [6, 7])] == elsewhere[1:]
    store.forget(ME.tenant)
    assert list(store.along(ME, [1] * 8)) == [] and store.total() == (
        1,
        store.held(RecordOwner.of("you", "").tenant)[1],
    )


def test_of_many_records_that_begin_alike_those_are_looked_at_that_go_on_so(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(2, 3 * MOST_SIBLINGS):
        store.write(*record([1, number]))
    wanted = store.find(record([1, 7])[0].name)
    assert [entry for entry, _ in store.along(ME, [1, 7, 9])] == [wanted]
    assert len(list(store.along(ME, [1, 1, 1]))) == MOST_SIBLINGS


def test_where_others_fill_the_cap_nothing_is_written_and_nothing_removed(tmp_path: Path) -> None:
    store = opened(tmp_path, DiskLimits(2_000_000))
    entry = store.write(*record(SHORT))
    (tmp_path / "somebody's").write_bytes(b"x" * 900_000)
    with pytest.raises(NoDiskRoom):
        store.write(*record([2] * 400))
    assert is_right(store.read(entry))


def test_what_is_short_on_the_drive_is_not_taken_and_not_made_up_for(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = opened(tmp_path, DiskLimits(1 << 26, floor=1 << 20, sync=False), files)
    written = [store.write(*record([number] * 100)) for number in range(5)]
    files.free_bytes = 1 << 19
    held = store.total()[1]
    store.write(*record([9] * 100))
    assert store.total()[1] <= held + 100  # another went for it
    assert sum(entry.lost for entry in written) == 1
    with pytest.raises(NoDiskRoom):
        store.write(*record([8] * 10_000))
    assert sum(entry.lost for entry in written) == 1


def test_a_folder_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(*record(SHORT))
    store.close()
    files = FaultyFiles(lambda call: errno.EROFS if call in ("put", "rename", "sync", "remove") else None)
    again = opened(tmp_path, files=files)
    (entry,) = again.entries(ME)
    assert is_right(again.read(entry))
    with pytest.raises(OSError):
        again.write(*record(LONG))
    assert is_right(again.read(entry))


def test_a_folder_that_vanished_comes_back_with_the_next_record(tmp_path: Path) -> None:
    store = opened(tmp_path / "kept")
    entry = store.write(*record(SHORT))
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(OSError):
        store.read(entry)
    found = store.write(*record(LONG))
    assert is_right(store.read(found))


def test_clearing_takes_a_tenants_files_and_no_others(tmp_path: Path) -> None:
    store = opened(tmp_path)
    you = RecordOwner.of("you", "")
    mine = store.write(*record(SHORT))
    yours = store.write(*record(SHORT, owner=you))
    assert store.forget(ME.tenant) == mine.size
    assert mine.lost and not yours.lost
    assert store.held(you.tenant) == (1, yours.size)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1


def test_what_another_process_wrote_or_removed_is_known_after_the_next_write(tmp_path: Path) -> None:
    here, there = opened(tmp_path), opened(tmp_path)
    mine = here.write(*record(SHORT))
    there.write(*record(LONG))
    assert {entry.end for entry in there.entries(ME)} == {3, 6}
    there.forget(ME.tenant)
    here.write(*record([5]))
    assert mine.lost and [entry.end for entry in here.entries(ME)] == [1]
    there.write(*record([6, 6]))
    here.write(*record([7, 7, 7]))
    assert {entry.end for entry in here.entries(ME)} == {1, 2, 3}


def test_what_the_states_depend_on_can_be_read_in_words(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert json.loads((tmp_path / store.scope / "about.json").read_text()) == {"name": "the model abc", **KEY}


def aside(folder: Path) -> list[str]:
    return [file.name for file in (folder / "damaged").glob("*")]


@pytest.mark.parametrize("known", ["by its file", "by the index"])
def test_a_record_that_another_secret_sealed_is_a_miss_and_set_aside(tmp_path: Path, known: str) -> None:
    header, data = record(SHORT)
    store = opened(tmp_path, secret=b"ours")
    entry = store.write(header, data)
    forged = replace(header, sums=tensor_checksums(other := [bytes(len(raw)) for raw in data]))
    path = one_file(tmp_path)
    path.write_bytes(b"".join((forged.encoded(b"theirs"), *other)))
    if known == "by the index":
        with pytest.raises(DamagedRecord, match="another key than this server's"):
            store.read(entry)
    else:
        store.close()
        (tmp_path / "index.sqlite").unlink()
        store = opened(tmp_path, secret=b"ours")
    assert store.entries(ME) == [] and aside(tmp_path) == [path.name]
    assert is_right(store.read(store.write(header, data)))


def test_a_record_without_a_mac_is_a_miss_and_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path).write(*record(SHORT))
    path = one_file(tmp_path)
    path.write_bytes(re.sub(rb'"mac": "[0-9a-f]{64}", ', b"", path.read_bytes()))
    (tmp_path / "index.sqlite").unlink()
    assert opened(tmp_path).entries(ME) == [] and aside(tmp_path) == [path.name]


def test_a_tensor_is_sealed_too(tmp_path: Path) -> None:
    """By a sum that nobody can keep while they change what it is of, as they could a check for accidents."""
    store = opened(tmp_path)
    entry = store.write(*record(SHORT))
    assert all(len(each) == 32 for each in store.read(entry).header.sums)


def test_servers_with_different_secrets_share_a_folder_and_leave_each_others_records_alone(tmp_path: Path) -> None:
    ours, theirs = (opened(tmp_path, secret=secret) for secret in (b"ours", b"theirs"))
    header, data = record(SHORT)
    entry = ours.write(header, data)
    assert theirs.entries(ME) == [] and opened(tmp_path, secret=b"theirs").entries(ME) == []
    other = theirs.write(header, data)
    assert is_right(ours.read(entry)) and is_right(theirs.read(other)) and aside(tmp_path) == []
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    assert is_right((again := opened(tmp_path, secret=b"ours")).read(again.entries(ME)[0]))


@pytest.mark.parametrize("name", ["lock", "index.sqlite", "damaged"])
def test_links_that_somebody_put_in_place_of_files_are_refused_and_not_followed(tmp_path: Path, name: str) -> None:
    folder, target = tmp_path / "folder", tmp_path / "target"
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(target)
    with pytest.raises(PermissionError, match="is a link, which ingot did not make: remove it"):
        opened(folder)
    with pytest.raises(OSError), FileSystem().alone(folder / name, 0):
        raise AssertionError("it was followed")
    assert not target.exists()
