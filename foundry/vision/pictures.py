"""Pictures of coloured shapes and digits, drawn with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (215, 35, 40),
    "green": (40, 165, 60),
    "blue": (45, 75, 220),
    "yellow": (240, 222, 50),
    "purple": (145, 50, 185),
    "orange": (250, 135, 25),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
GLYPHS = {
    "0": "01110 10001 10001 10001 10001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "01110 10000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00001 01110",
}
GLYPH_WIDTH, GLYPH_HEIGHT = 5, 7
NOISE = 10


@dataclass(frozen=True)
class Figure:
    """A shape of one colour; places and the radius are in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


def blank(width: int, height: int, colour: tuple[int, int, int]) -> np.ndarray:
    return np.broadcast_to(np.array(colour, dtype=np.float32), (height, width, 3)).copy()


def draw(canvas: np.ndarray, figure: Figure, colour: tuple[int, int, int]) -> None:
    """Paint the figure onto the canvas, with smooth edges, cut where the canvas ends."""
    height, width = canvas.shape[:2]
    reach = figure.radius + 2
    left, right = max(0, int(figure.x - reach)), min(width, int(figure.x + reach) + 1)
    top, bottom = max(0, int(figure.y - reach)), min(height, int(figure.y + reach) + 1)
    x = np.arange(left, right, dtype=np.float32)[None, :] + 0.5 - figure.x
    y = np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5 - figure.y
    cover = np.clip(0.5 - distance(figure.shape, x, y, figure.radius), 0, 1)[..., None]
    part = canvas[top:bottom, left:right]
    part += cover * (np.array(colour, dtype=np.float32) - part)


def distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """How far each place is outside the shape's edge; negative inside."""
    match shape:
        case "circle":
            return np.hypot(x, y) - radius
        case "square":
            return np.maximum(abs(x), abs(y)) - 0.88 * radius
        case "ring":
            return abs(np.hypot(x, y) - 0.76 * radius) - 0.24 * radius
        case "cross":
            bar = 0.32 * radius
            return np.minimum(np.maximum(abs(x) - radius, abs(y) - bar), np.maximum(abs(x) - bar, abs(y) - radius))
        case "triangle":
            return np.maximum((1.75 * abs(x) - (y + radius)) / 2.0156, y - 0.75 * radius)
    raise ValueError(f"no such shape: {shape}")


def write(canvas: np.ndarray, digits: str, x: int, y: int, scale: int, colour: tuple[int, int, int]) -> None:
    """Write digits with their upper left corner at (x, y); they must lie on the canvas."""
    for digit in digits:
        glyph = np.array([[int(bit) for bit in line] for line in GLYPHS[digit].split()], dtype=bool)
        inked = np.kron(glyph, np.ones((scale, scale), dtype=bool))
        canvas[y : y + inked.shape[0], x : x + inked.shape[1]][inked] = colour
        x += (GLYPH_WIDTH + 1) * scale


def written_width(digits: str, scale: int) -> int:
    return (len(digits) * (GLYPH_WIDTH + 1) - 1) * scale


def shade(colour: str, chance: np.random.Generator) -> tuple[int, int, int]:
    """The colour, not always quite the same."""
    red, green, blue = np.clip(np.array(COLOURS[colour]) + chance.integers(-14, 15, 3), 0, 255).tolist()
    return red, green, blue


def finished(canvas: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """The canvas as bytes, in half of the cases with some noise."""
    if chance.random() < 0.5:
        most = int(chance.integers(1, NOISE + 1))
        canvas = canvas + chance.integers(-most, most + 1, canvas.shape, dtype=np.int8)
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)
