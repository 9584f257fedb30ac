"""Files that a request refers to: fetched from other servers, or sent as data URLs.

Files are fetched only from hosts that the settings name. The address comes from a client, who must not make this server
connect to what only it can reach (SSRF). So at every hop the host is resolved once, every address must be public
(unless the setting names that very address), and the connection goes to the checked address. Redirects are followed by
the same rules. The size is limited while reading, and one time limit covers everything from the first connection to the
last byte: no wait on a socket is longer than a slice of it.

Fetching takes long, so the threads that read bodies do not wait for it (`prefetched_files`, `Unfetched`). Imports
nothing heavy.
"""

from __future__ import annotations

import binascii
import errno
import http.client
import io
import ipaddress
import os
import re
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from ingot.errors import BadMedia, Cancelled, IngotError
from ingot.media import bounds

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PIECE: Final = 1 << 16
_SLICE_S: Final = 0.1
_PORTS: Final = {"http": 80, "https": 443}
T = TypeVar("T")
HostLookup = Callable[[str, int], Sequence[str]]


def host_addresses(host: str, port: int) -> Sequence[str]:
    """Every address of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def fetch_file(
    url: str,
    hosts: Sequence[str],
    *,
    lookup: HostLookup = host_addresses,
    timeout_s: float = bounds.FETCH_S,
    clock: Callable[[], float] = time.monotonic,
    going: Callable[[], bool] = lambda: True,
) -> bytes:
    """The file at this address. Raises BadMedia where that is not allowed or fails, and Cancelled once `going` says
    no."""
    limit = _TimeLimit(clock() + timeout_s, clock, going)
    for _ in range(bounds.REDIRECTS + 1):
        hop = _Hop.of(url, hosts, lookup)
        try:
            with _send_request(hop, limit) as answer:
                if answer.status not in _REDIRECTS:
                    return _read_body(answer, hop)
                url = urljoin(url, answer.getheader("location") or "")
        except (OSError, http.client.HTTPException) as error:
            raise BadMedia(f"the file at {hop.host} could not be fetched: {_failure_reason(error)}.") from error
    raise BadMedia(f"the file was not found within {bounds.REDIRECTS} redirects.")


def host_allowed(host: str, hosts: Sequence[str]) -> bool:
    """By its name; `*.example.org` allows its subdomains, and `*` all hosts."""
    name = host.lower().rstrip(".")
    return any(
        allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
        for allowed in (each.lower() for each in hosts)
    )


@dataclass(frozen=True, slots=True)
class _TimeLimit:
    until: float
    clock: Callable[[], float]
    going: Callable[[], bool]

    def left(self) -> float:
        """Seconds. Raises BadMedia where there are none, and Cancelled where the client has left."""
        if not self.going():
            raise Cancelled("The client is gone.")
        left = self.until - self.clock()
        if left <= 0:
            raise BadMedia(f"the file took longer than {bounds.FETCH_S:g} seconds to fetch.")
        return left

    def wait(self, sock: socket.socket, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, repeated until it does not time out."""
        while True:
            sock.settimeout(min(_SLICE_S, self.left()))
            with suppress(TimeoutError):
                return attempt()


@dataclass(frozen=True, slots=True)
class _Hop:
    """An allowed address, resolved."""

    scheme: str
    host: str
    port: int
    address: str
    path: str

    @classmethod
    def of(cls, url: str, hosts: Sequence[str], lookup: HostLookup) -> _Hop:
        parts, port = _split_url(url)
        host = parts.hostname or ""
        if parts.scheme not in _PORTS:
            raise BadMedia("files are fetched only by http and https.")
        if not host or parts.username is not None or parts.password is not None:
            raise BadMedia("an address to fetch from must have a host, and no user.")
        if not host_allowed(host, hosts):
            raise BadMedia(f"nothing is fetched from {host[:100]}: --media-hosts does not name it.")
        port = port or _PORTS[parts.scheme]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host, port, _public_address(host, port, hosts, lookup), _ascii_path(path))


def _split_url(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        return parts, parts.port
    except ValueError:
        raise BadMedia("the address to fetch from cannot be read.") from None


def _ascii_path(path: str) -> str:
    if not path.isascii() or any(character <= " " or character == "\x7f" for character in path):
        raise BadMedia("an address to fetch from may have only printable ASCII; write other characters as %XX.")
    return path


def _public_address(host: str, port: int, hosts: Sequence[str], lookup: HostLookup) -> str:
    """The first of a host's addresses, if all of them are allowed."""
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
    """`localhost` in the setting allows loopback addresses."""
    return host == "localhost" in named and address.is_loopback


@contextmanager
def _send_request(hop: _Hop, limit: _TimeLimit) -> Iterator[http.client.HTTPResponse]:
    with closing(_connect(hop, limit)) as plain, closing(_start_tls(plain, hop, limit)) as sock:
        connection = http.client.HTTPConnection(hop.host, hop.port)
        connection.default_port = _PORTS[hop.scheme]  # which is left out of the Host header
        connection.sock = cast(socket.socket, _LimitedSocket(sock, limit))
        connection.request("GET", hop.path, headers={"Accept-Encoding": "identity", "User-Agent": "ingot"})
        yield connection.getresponse()


def _connect(hop: _Hop, limit: _TimeLimit) -> socket.socket:
    """Connect to the checked address. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in hop.address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        error = sock.connect_ex((hop.address, hop.port))
        if error == errno.EINPROGRESS:
            with selectors.DefaultSelector() as selector:
                selector.register(sock, selectors.EVENT_WRITE)
                while not selector.select(min(_SLICE_S, limit.left())):
                    pass
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def _start_tls(sock: socket.socket, hop: _Hop, limit: _TimeLimit) -> socket.socket:
    """With the original host name. Raises OSError."""
    if hop.scheme != "https":
        return sock
    limit.left()
    sock.settimeout(_SLICE_S)
    secured = ssl.create_default_context().wrap_socket(sock, server_hostname=hop.host, do_handshake_on_connect=False)
    try:
        limit.wait(secured, secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


class _LimitedSocket:
    """What http.client needs of a socket. It does not close the real one."""

    def __init__(self, sock: socket.socket, limit: _TimeLimit) -> None:
        self._sock, self._limit = sock, limit

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._limit.left())  # a limit for all of it
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_LimitedReader(self._sock, self._limit))

    def close(self) -> None:
        pass


class _LimitedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, limit: _TimeLimit) -> None:
        super().__init__()
        self._sock, self._limit = sock, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._limit.wait(self._sock, lambda: self._sock.recv_into(buffer))


def _read_body(answer: http.client.HTTPResponse, hop: _Hop) -> bytes:
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
    return b"".join(pieces)


def _failure_reason(error: Exception) -> str:
    """Without addresses, which are not for clients."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    return "its certificate is not valid" if isinstance(error, ssl.SSLError) else "the connection failed"


prefetched_files: ContextVar[dict[str, bytes | IngotError] | None] = ContextVar("ready", default=None)
"""If this is set, nothing is fetched in place: a file that is not in it raises Unfetched."""


class Unfetched(Exception):
    """A file is needed that is not fetched yet. The caller catches this and calls `fetch` in another thread."""

    def __init__(self, url: str, hosts: Sequence[str]) -> None:
        super().__init__("a file is not fetched yet")
        self.url, self._hosts = url, hosts

    def fetch(self, going: Callable[[], bool] = lambda: True) -> bytes | IngotError:
        """The file, or the error."""
        try:
            return fetch_file(self.url, self._hosts, going=going)
        except IngotError as error:
            return error


def fetched_file(url: str, hosts: Sequence[str]) -> bytes:
    """Raises BadMedia where the file cannot be fetched."""
    prefetched = prefetched_files.get()
    if prefetched is None:
        return fetch_file(url, hosts)
    found = prefetched.get(url)
    if found is None:
        raise Unfetched(url, hosts)
    if isinstance(found, IngotError):
        raise found
    return found


_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)
_LONGEST_HEAD: Final = 256


def split_data_url(url: str) -> tuple[str, str]:
    """The media type of a data URL, in lower case, and its text. Raises BadMedia."""
    head = _DATA_URL.match(url[:_LONGEST_HEAD])
    if head is None:
        raise BadMedia("a data URL begins with its type, as in data:image/png;base64,….")
    if head[3] is None:
        raise BadMedia("data URLs must be in base64, as in data:image/png;base64,….")
    return (head[1] or "").lower(), url[head.end() :]


def decode_base64(text: str) -> bytes:
    """White space and missing padding are allowed. Nothing too long is decoded."""
    if len(text) > bounds.ITEM_BYTES * 4 // 3 + 4:
        raise BadMedia(f"the file has more than {bounds.ITEM_BYTES} bytes, which is the limit.")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return _decode_lenient(text)


def _decode_lenient(text: str) -> bytes:
    digits = "".join(text.split())
    try:
        return binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)
    except ValueError:
        raise BadMedia("the file is no base64.") from None
