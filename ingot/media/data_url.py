"""Files that are sent inside of a text."""

from __future__ import annotations

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
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return _forgiving(text)


def _forgiving(text: str) -> bytes:
    kept = "".join(text.split())
    try:
        return binascii.a2b_base64(kept + "=" * (-len(kept) % 4), strict_mode=True)
    except ValueError:
        raise BadMedia("the file is no base64.") from None
