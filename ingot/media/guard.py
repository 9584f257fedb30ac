"""What is refused before anything is unpacked: files that are small and become huge."""

from __future__ import annotations

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.size import Size


def check_size(size: Size) -> None:
    """Raises BadMedia for what has no area, more than memory is lent for, or no sensible shape."""
    if min(size) < 1:
        raise BadMedia(f"the picture is {size.width} by {size.height} pixels, which is nothing.")
    if size.area > bounds.PIXELS or max(size) > bounds.SIDE:
        raise BadMedia(
            f"the picture is {size.width} by {size.height} pixels; at most {bounds.PIXELS} of them, and {bounds.SIDE} "
            "along a side, are taken. Send it smaller."
        )
    if size.aspect > bounds.ASPECT:
        raise BadMedia(
            f"the picture is {size.width} by {size.height} pixels; its longer side may be at most {bounds.ASPECT} "
            "times the shorter. Cut it."
        )


def check_bytes(count: int) -> None:
    if count > bounds.ITEM_BYTES:
        raise BadMedia(f"the file has {count} bytes; at most {bounds.ITEM_BYTES} are taken.")
