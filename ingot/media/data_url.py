"""Files that are sent inside of a text."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from ingot.errors import BadMedia
from ingot.media import bounds

_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)
_LONGEST_HEAD: Final = 256


def split(url: str) -> tuple[str, str]:
    """The media type that a data URL states, in small letters, and its text. Raises BadMedia."""
    head = _URL.match(url[:_LONGEST_HEAD])
    if head is None:
        raise BadMedia("a data URL begins with its type, as in data:image/png;base64,….")
    if head[3] is None:
        raise BadMedia("data URLs are taken in base64 alone, as in data:image/png;base64,….")
    return (head[1] or "").lower(), url[head.end() :]


def decoded(text: str) -> bytes:
    """Of base64, of which white space and missing padding are forgiven. Nothing too long is decoded."""
    if len(text) > bounds.ITEM_BYTES * 4 // 3 + 4:
        raise BadMedia(f"the file has more than {bounds.ITEM_BYTES} bytes, which is the most that is taken.")
    kept = "".join(text.split())
    try:
        return base64.b64decode(kept + "=" * (-len(kept) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadMedia("the file is no base64.") from None
