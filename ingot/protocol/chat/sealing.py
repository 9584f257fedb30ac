"""The `encrypted_content` of reasoning items: a model's thinking in a form that only this server makes.

It is signed and compressed, not secret: whoever holds it was given the thinking in plain text too. The signature
proves that the thinking is word for word what a model here produced, for the same tenant.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import zlib
from dataclasses import dataclass
from typing import Final

VERSION: Final = "ingot1."
SIGNATURE_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class ThinkingSeal:
    """Made from the server's secret and the tenant's name, so that no tenant can use what another was given."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes, tenant: str) -> ThinkingSeal:
        return cls(hmac.digest(secret, b"reasoning\0" + tenant.encode(), "sha256"))

    def close(self, text: str) -> str:
        packed = zlib.compress(text.encode())
        return VERSION + base64.urlsafe_b64encode(self._signature(packed) + packed).decode()

    def open(self, sealed: str) -> str | None:
        """The text; None where `sealed` is not what `close` made with the same key."""
        try:
            raw = base64.b64decode(sealed.removeprefix(VERSION), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        signature, packed = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        if not sealed.startswith(VERSION) or not hmac.compare_digest(signature, self._signature(packed)):
            return None
        return zlib.decompress(packed).decode()

    def _signature(self, packed: bytes) -> bytes:
        return hmac.digest(self.key, packed, "sha256")[:SIGNATURE_BYTES]
