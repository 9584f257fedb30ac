"""Keys and values of a layer outside of pages, of which whole pages are in fewer bits, as they lie where live ones are
coded. Only the engine thread may call anything here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.cache.coded_pages import PageForm, in_one
from ingot.cache.deltas import KVDelta
from ingot.cache.pages import PAGE, pages_of


@dataclass(frozen=True, slots=True)
class CodedDelta(KVDelta):
    """`arrays` are the first pages' bytes [pages, heads, head_bytes] and, where there are tokens behind those, their
    keys and values. The first page is whole, though it may begin before token `begin`; all of them end before `end`."""

    form: PageForm

    @property
    def coded(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def raw(self) -> KVDelta:
        return KVDelta((self._first + self.coded) * PAGE, self.end, self.arrays[1:])

    @property
    def _first(self) -> int:
        return self.begin // PAGE

    @property
    def is_sound(self) -> bool:
        """Whether it is what it should be, as far as its pages are concerned."""
        pages, raw = self.arrays[0], self.raw
        whole = (self.form.heads, self.form.head_bytes) == tuple(pages.shape[1:]) and pages.dtype == mx.uint8
        return whole and (raw.begin < raw.end if raw.arrays else raw.begin == raw.end)

    def behind(self, begin: int, whole: int) -> KVDelta:
        if self.begin >= begin:
            return self
        gone = begin // PAGE - self._first
        if gone >= self.coded:
            return self.raw.behind(begin, whole)
        return replace(self, begin=begin, arrays=(self.arrays[0][gone:], *self.arrays[1:]))

    def before(self, end: int, whole: int) -> KVDelta:
        if self.begin >= end:
            return KVDelta(end, end, ())
        seen = pages_of(end) - self._first
        if seen > self.coded:
            return replace(self, end=min(self.end, end), arrays=(self.arrays[0], *self.raw.before(end, whole).arrays))
        some = replace(self, end=(self._first + seen) * PAGE, arrays=(self.arrays[0][:seen],))
        cut = some.with_coded(end // PAGE - self._first)
        surplus = cut.end - end
        if not surplus:
            return cut
        *pages, keys, values = cut.arrays
        return replace(cut, end=end, arrays=(*pages, keys[:, :, :-surplus], values[:, :, :-surplus]))

    def with_coded(self, pages: int) -> KVDelta:
        if pages >= self.coded:
            return self
        keys, values = map(in_one, self.form.decode(self.arrays[0][pages:]))
        if self.arrays[1:]:
            both = zip((keys, values), self.arrays[1:], strict=True)
            keys, values = (mx.concatenate([own, behind], axis=2) for own, behind in both)
        if pages:
            return replace(self, arrays=(self.arrays[0][:pages], keys, values))
        before = self.begin % PAGE
        return KVDelta(self.begin, self.end, (keys[:, :, before:], values[:, :, before:]))

    def copied(self) -> KVDelta:
        return replace(self, arrays=KVDelta.copied(self).arrays)
