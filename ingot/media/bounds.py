"""Every bound on pictures, clips and sounds, in one table. A pair is (least, most), both allowed."""

from __future__ import annotations

from typing import Final

# what is sent
ITEMS: Final = 256  # pictures and clips of one request
ITEM_BYTES: Final = 256 << 20  # of one of them; a body's own limit is as a rule smaller
FETCHED_ITEMS: Final = 16  # of one request
FETCHED_BYTES: Final = 64 << 20  # of all that are fetched
REDIRECTS: Final = 5
FETCH_S: Final = 20.0

# what it unpacks to
PIXELS: Final = 64_000_000  # of one picture or frame
SIDE: Final = 65_535
ASPECT: Final = 200  # the longer side over the shorter
HEADER_STEPS: Final = 262_144  # pieces that are looked at to find a picture's size

# clips
FRAMES: Final[tuple[int, int]] = (1, 768)  # that are shown of one
STILLS: Final = 32  # frames that are shown as pictures, unless a request says otherwise
SENT_FRAMES: Final = 4096  # sent as pictures
FPS: Final[tuple[float, float]] = (0.01, 120.0)
CLIP_S: Final = 6 * 3600.0

# sounds
SOUND_S: Final = 12 * 3600.0
SOUND_RATE: Final[tuple[int, int]] = (1_000, 768_000)  # samples a second
SOUND_CHANNELS: Final[tuple[int, int]] = (1, 64)

# PDFs, whose pages are shown as pictures
PDF_PAGES: Final = 100
PDF_BYTES: Final = 32 << 20
PDF_DPI: Final = 144
PDF_PAGE_PIXELS: Final = 4_000_000
PDF_CPU_S: Final = 15.0  # to read one, and to draw a page
PDF_WALL_S: Final = 60.0

# what a request may say of sizes
PIXEL_LIMIT: Final[tuple[int, int]] = (1, PIXELS)
