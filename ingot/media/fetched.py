"""Files that were fetched for a request. Fetching takes long: who reads bodies does not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

from ingot.errors import IngotError
from ingot.media.fetch import fetch

ready: ContextVar[dict[str, bytes | IngotError] | None] = ContextVar("ready", default=None)
"""Where it is set, nothing is fetched in place: what is not found here raises Unfetched."""


class Unfetched(Exception):
    """A file is needed that nobody has fetched yet; `fetch` does it, in whichever thread has the time."""

    def __init__(self, url: str, hosts: Sequence[str]) -> None:
        super().__init__("a file is not fetched yet")
        self.url, self._hosts = url, hosts

    def fetch(self, going: Callable[[], bool] = lambda: True) -> bytes | IngotError:
        """The file, or why it cannot be had, such as that `going` said no."""
        try:
            return fetch(self.url, self._hosts, going=going)
        except IngotError as error:
            return error


def fetched_bytes(url: str, hosts: Sequence[str]) -> bytes:
    """Raises BadMedia where the file cannot be had."""
    known = ready.get()
    if known is None:
        return fetch(url, hosts)
    found = known.get(url)
    if found is None:
        raise Unfetched(url, hosts)
    if isinstance(found, IngotError):
        raise found
    return found
