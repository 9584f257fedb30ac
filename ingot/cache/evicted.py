"""What was kept and is gone: a bounded memory of evicted prefixes, so that a miss can be told from a loss.

Of each evicted piece it holds nothing but a digest of the tokens up to and into it. A prompt is asked about where the
index knows it no further; the answer is right but for pieces that were forgotten here too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

HEAD = 32
"""A piece counts as the prompt's own when this many of its first tokens, or all of a shorter one, agree."""
REMEMBERED = 8192


class Evicted:
    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, owner: Sequence[str], before: Sequence[int], piece: Sequence[int]) -> None:
        """`piece` was kept behind the tokens `before` and is not any more."""
        digest = _begun(owner, before)
        digest.update(_raw(piece[:HEAD]))
        self._digests[digest.digest()] = None
        self._digests.move_to_end(digest.digest())
        if len(self._digests) > self._most:
            self._digests.popitem(last=False)

    def holds(self, owner: Sequence[str], tokens: Sequence[int], known: int) -> bool:
        """Whether a piece that went on where the first `known` of `tokens` end, as they do, was evicted."""
        if not self._digests:
            return False
        digest = _begun(owner, tokens[:known])
        for token in tokens[known : known + HEAD]:
            digest.update(_raw([token]))
            if digest.digest() in self._digests:
                return True
        return False


def _begun(owner: Sequence[str], tokens: Sequence[int]) -> blake2b:
    digest = blake2b(digest_size=16)
    for part in owner:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    digest.update(_raw(tokens))
    return digest


def _raw(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
