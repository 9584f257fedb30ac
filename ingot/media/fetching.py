"""Files fetched from other servers, and only from those that the settings name.

An address comes from whoever sends a request, who must not make this server speak to what only it can reach. So at
every hop the host is looked up once, every answer must lie in the public network (unless the setting names that very
address), and it is that answer which is dialled, under the name that was asked for. Redirects are followed by hand, by
the same rules. What is read is counted while it comes.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from ingot.errors import BadMedia
from ingot.media import bounds

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PIECE: Final = 1 << 16
_PORTS: Final = {"http": 80, "https": 443}
Lookup = Callable[[str, int], Sequence[str]]


def addresses(host: str, port: int) -> Sequence[str]:
    """Every address of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def fetch(url: str, hosts: Sequence[str], *, lookup: Lookup = addresses, timeout_s: float = bounds.FETCH_S) -> bytes:
    """The file at this address. Raises BadMedia, which says what is not allowed or did not work."""
    until = time.monotonic() + timeout_s
    for _ in range(bounds.REDIRECTS + 1):
        hop = _Hop.of(url, hosts, lookup)
        try:
            with _asked(hop, until) as answer:
                if answer.status not in _REDIRECTS:
                    return _body(answer, hop, until)
                url = urljoin(url, answer.getheader("location") or "")
        except (OSError, http.client.HTTPException) as error:
            raise BadMedia(f"the file at {hop.host} could not be fetched: {_reason(error)}.") from error
    raise BadMedia(f"the file was not found within {bounds.REDIRECTS} redirects.")


def host_allowed(host: str, hosts: Sequence[str]) -> bool:
    """By its name; `*.example.org` allows what is below that, and `*` all."""
    name = host.lower().rstrip(".")
    return any(
        allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
        for allowed in (each.lower() for each in hosts)
    )


@dataclass(frozen=True, slots=True)
class _Hop:
    """An address that may be asked, and where it was found to be."""

    scheme: str
    host: str
    port: int
    address: str
    path: str

    @classmethod
    def of(cls, url: str, hosts: Sequence[str], lookup: Lookup) -> _Hop:
        parts, port = _split(url)
        host = parts.hostname or ""
        if parts.scheme not in _PORTS:
            raise BadMedia("files are fetched by http and https alone.")
        if not host or parts.username is not None or parts.password is not None:
            raise BadMedia("an address to fetch from names a host, and no user.")
        if not host_allowed(host, hosts):
            raise BadMedia(f"nothing is fetched from {host[:100]}: --media-hosts does not name it.")
        port = port or _PORTS[parts.scheme]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host, port, _routable(host, port, hosts, lookup), _ascii(path))


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        return parts, parts.port
    except ValueError:
        raise BadMedia("the address to fetch from cannot be read.") from None


def _ascii(path: str) -> str:
    if not path.isascii() or any(character <= " " or character == "\x7f" for character in path):
        raise BadMedia("an address to fetch from holds letters, digits and signs of ASCII alone, others as %XX.")
    return path


def _routable(host: str, port: int, hosts: Sequence[str], lookup: Lookup) -> str:
    """The first of a host's addresses, if all of them may be dialled."""
    try:
        found = [ipaddress.ip_address(each.partition("%")[0]) for each in lookup(host, port)]
    except (OSError, UnicodeError, ValueError) as error:
        raise BadMedia(f"the host {host[:100]} was not found.") from error
    named = {each.lower() for each in hosts}
    for address in found:
        inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None) or address
        public = address.is_global and inner.is_global and not address.is_multicast
        if not public and str(address) not in named and not _named_loopback(host, address, named):
            raise BadMedia(f"{host[:100]} is not in the public network: --media-hosts may name its address.")
    if not found:
        raise BadMedia(f"the host {host[:100]} was not found.")
    return str(found[0])


def _named_loopback(host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address, named: set[str]) -> bool:
    """`localhost` says as plainly as its address does what is meant."""
    return host == "localhost" in named and address.is_loopback


@contextmanager
def _asked(hop: _Hop, until: float) -> Iterator[http.client.HTTPResponse]:
    with closing(_Pinned(hop, _left(until))) as connection:
        connection.request("GET", hop.path, headers={"Accept-Encoding": "identity", "User-Agent": "ingot"})
        yield connection.getresponse()


class _Pinned(http.client.HTTPConnection):
    """Dials the address that was checked, and speaks to it by the name that was asked for."""

    def __init__(self, hop: _Hop, timeout: float) -> None:
        super().__init__(hop.host, hop.port, timeout=timeout)
        self._hop = hop
        self.default_port = _PORTS[hop.scheme]

    def connect(self) -> None:
        self.sock = socket.create_connection((self._hop.address, self._hop.port), self.timeout)
        if self._hop.scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self._hop.host)


def _body(answer: http.client.HTTPResponse, hop: _Hop, until: float) -> bytes:
    if answer.status != 200:
        raise BadMedia(f"{hop.host} answered with status {answer.status}.")
    if answer.getheader("content-encoding", "identity").lower() != "identity":
        raise BadMedia(f"{hop.host} sent the file compressed, which was not asked for.")
    pieces, size = [], 0
    while piece := answer.read1(_PIECE):
        size += len(piece)
        if size > bounds.FETCHED_BYTES:
            raise BadMedia(f"the file has more than {bounds.FETCHED_BYTES} bytes, which is the most that is fetched.")
        pieces.append(piece)
        _left(until)
    return b"".join(pieces)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise BadMedia(f"the file took longer than {bounds.FETCH_S:g} seconds to fetch.")
    return left


def _reason(error: Exception) -> str:
    """Without addresses, which are this server's own business."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    return "its certificate is not valid" if isinstance(error, ssl.SSLError) else "the connection failed"
