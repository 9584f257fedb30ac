"""Every bound on images, video and audio, in one table. A pair is (least, most), both allowed."""

from __future__ import annotations

from typing import Final

# What is sent
ITEMS: Final = 256  # images and videos of one request
ITEM_BYTES: Final = 256 << 20  # of one of them; a body's own limit is as a rule smaller
FETCHED_ITEMS: Final = 16  # of one request
FETCHED_BYTES: Final = 64 << 20  # of all that are fetched
REDIRECTS: Final = 5
FETCH_S: Final = 20.0

# Decoded sizes
PIXELS: Final = 64_000_000  # of one image or frame
SIDE: Final = 65_535
ASPECT: Final = 200  # the longer side over the shorter

# What decoding may take, in a process of its own
HEADER_MEMORY: Final = 64 << 20  # to find an image's size or audio's length
HEADER_CPU_S: Final = 10.0
PIXEL_MEMORY: Final = 1 << 30  # of all images, videos and PDFs at a time, unless models reserve another amount
DECODE_WALL_S: Final = 60.0  # for each frame
IMAGE_MEMORY: Final = 32 << 20  # plus, for each pixel:
IMAGE_PIXEL_BYTES: Final = 12
WEBP_PIXEL_BYTES: Final = 24
IMAGE_CPU_S: Final = 30.0
VIDEO_MEMORY: Final = 192 << 20  # for the header, or for frames plus, for each pixel:
VIDEO_PIXEL_BYTES: Final = 32
VIDEO_CPU_S: Final = 20.0  # for each sampled frame

# videos
FRAMES: Final[tuple[int, int]] = (1, 768)  # sampled of one
STILLS: Final = 32  # frames that are sampled as images by default
SENT_FRAMES: Final = 4096  # sent as images
FPS: Final[tuple[float, float]] = (0.01, 120.0)
VIDEO_S: Final = 6 * 3600.0

# audio
AUDIO_S: Final = 12 * 3600.0
AUDIO_RATE: Final[tuple[int, int]] = (1_000, 768_000)  # samples a second
AUDIO_CHANNELS: Final[tuple[int, int]] = (1, 64)
AUDIO_STREAMS: Final = 4  # transcribed at a time
AUDIO_MEMORY: Final = 32 << 20  # for each of them

# PDFs, whose pages become images
PDF_PAGES: Final = 100
PDF_BYTES: Final = 32 << 20
PDF_DPI: Final = 144
PDF_PAGE_PIXELS: Final = 4_000_000
PDF_CPU_S: Final = 15.0  # to read one, and to render a page
PDF_MEMORY: Final = 256 << 20

# What a request may set
PIXEL_LIMIT: Final[tuple[int, int]] = (1, PIXELS)
