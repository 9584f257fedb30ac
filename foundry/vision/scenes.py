"""Pictures and clips with questions that have one right answer each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foundry.lesson import HELD_OUT
from foundry.vision.pictures import (
    COLOURS,
    GLYPH_HEIGHT,
    SHAPES,
    Figure,
    blank,
    draw,
    finished,
    shade,
    write,
    written_width,
)

NUMBERS = "no one two three four five six".split()
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
MOST_FIGURES = 5
DIRECTIONS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Question:
    kind: str
    asked: str
    answer: str


@dataclass(frozen=True)
class Sight:
    """`frames` are the pictures, or with `clip` the frames of one clip: (count, height, width, 3), bytes."""

    frames: np.ndarray
    clip: bool
    questions: list[Question]


def seeded(seed: int, *, held_out: bool = False) -> np.random.Generator:
    """The source of a scene's choices. Training and measuring can never share one."""
    if not 0 <= seed < HELD_OUT:
        raise ValueError(f"the seed must lie in [0, {HELD_OUT}), and is {seed}")
    return np.random.default_rng(seed + HELD_OUT if held_out else seed)


def picture(chance: np.random.Generator, width: int, height: int) -> Sight:
    """One picture: figures, or a number."""
    return (_figures if chance.random() < 0.65 else _number)(chance, width, height)


def _figures(chance: np.random.Generator, width: int, height: int) -> Sight:
    count = int(chance.choice([1, 2, 3, 4, 5], p=[0.25, 0.25, 0.2, 0.15, 0.15]))
    cells = chance.permutation(len(PLACES))[:count].tolist()
    background, *rest = _colours(chance)
    painted = rest if chance.random() < 0.5 else rest[: int(chance.integers(1, 4))]
    drawn = list(SHAPES) if chance.random() < 0.5 else chance.permutation(SHAPES)[:2].tolist()
    canvas = blank(width, height, shade(background, chance))
    there: dict[str, tuple[str, str]] = {}
    for cell in cells:
        figure = _in_cell(chance, str(chance.choice(drawn)), str(chance.choice(painted)), cell, width, height)
        draw(canvas, figure, shade(figure.colour, chance))
        there[PLACES[cell]] = (figure.colour, figure.shape)
    asked = _about_figures(chance, there)
    asked.append(Question("background", "What colour is the background?", f"The background is {background}."))
    return Sight(finished(canvas, chance)[None], False, asked)


def _colours(chance: np.random.Generator) -> list[str]:
    return chance.permutation(list(COLOURS)).tolist()


def _in_cell(chance: np.random.Generator, shape: str, colour: str, cell: int, width: int, height: int) -> Figure:
    """A figure in one of the nine parts of the picture, well apart from those in the others."""
    wide, high = width / 3, height / 3
    room = min(wide, high) / 2
    radius = room * chance.uniform(0.62, 0.92)
    free_x, free_y = wide / 2 - radius, high / 2 - radius
    return Figure(
        shape,
        colour,
        (cell % 3 + 0.5) * wide + chance.uniform(-free_x, free_x),
        (cell // 3 + 0.5) * high + chance.uniform(-free_y, free_y),
        radius,
    )


def _about_figures(chance: np.random.Generator, there: dict[str, tuple[str, str]]) -> list[Question]:
    """Four or more questions, of as many kinds as the picture allows."""
    things = list(there.values())
    colours, shapes = [colour for colour, _ in things], [shape for _, shape in things]
    questions = [
        Question("count", "How many shapes are there?", _there_are(len(things), "shape")),
        *(_how_many(shape, shapes) for shape in _some(chance, shapes, SHAPES)),
        *(
            _how_many(f"{colour} shape", [f"{one} shape" for one in colours])
            for colour in _some(chance, colours, COLOURS)
        ),
    ]
    for place, (colour, shape) in there.items():
        if shapes.count(shape) == 1:
            questions.append(Question("colour", f"What colour is the {shape}?", f"The {shape} is {colour}."))
        if colours.count(colour) == 1:
            questions.append(Question("shape", f"Which shape is {colour}?", f"The {colour} shape is a {shape}."))
        if things.count((colour, shape)) == 1:
            questions.append(Question("place", f"Where is the {colour} {shape}?", _is_at(place)))
    for place in chance.permutation([*there, *chance.choice(PLACES, 1)])[:2].tolist():
        questions.append(Question("at", f"What is {_at(place)}?", _thing(there.get(place))))
    return questions


def _some(
    chance: np.random.Generator, present: list[str], possible: tuple[str, ...] | dict[str, tuple[int, int, int]]
) -> list[str]:
    """One that is there, and now and then one that need not be."""
    chosen = [str(chance.choice(present))]
    return [*chosen, str(chance.choice(list(possible)))] if chance.random() < 0.4 else chosen


def _how_many(wanted: str, present: list[str]) -> Question:
    return Question("count", f"How many {_plural(wanted)} are there?", _there_are(present.count(wanted), wanted))


def _plural(thing: str) -> str:
    return f"{thing}es" if thing.endswith("s") else f"{thing}s"


def _there_are(count: int, thing: str) -> str:
    return f"There is one {thing}." if count == 1 else f"There are {NUMBERS[count]} {_plural(thing)}."


def _at(place: str) -> str:
    return f"{'in' if place == 'center' else 'at'} the {place}"


def _is_at(place: str) -> str:
    return f"It is {_at(place)}."


def _thing(thing: tuple[str, str] | None) -> str:
    if thing is None:
        return "Nothing."
    colour, shape = thing
    return f"{'An' if colour == 'orange' else 'A'} {colour} {shape}."


def _number(chance: np.random.Generator, width: int, height: int) -> Sight:
    """A number of one to three digits, anywhere."""
    background, ink, *_ = _colours(chance)
    canvas = blank(width, height, shade(background, chance))
    digits = "".join(map(str, chance.integers(0, 10, int(chance.choice([1, 2, 3], p=[0.5, 0.3, 0.2])))))
    fitting = min((width - 2) // written_width(digits, 1), (height - 2) // GLYPH_HEIGHT)
    scale = int(chance.integers(4, min(8, fitting) + 1))
    x = int(chance.integers(0, width - written_width(digits, scale) + 1))
    y = int(chance.integers(0, height - GLYPH_HEIGHT * scale + 1))
    write(canvas, digits, x, y, scale, shade(ink, chance))
    read = Question("digits", "Which number is written?", f"The number is {digits}.")
    questions = [
        read,
        Question("background", "What colour is the background?", f"The background is {background}."),
        read,
        Question("colour", "What colour is the number?", f"The number is {ink}."),
    ]
    return Sight(finished(canvas, chance)[None], False, questions)


def pair(chance: np.random.Generator, width: int, height: int) -> Sight:
    """Two pictures with a figure each, or a number each."""
    things, frames = [], []
    for _ in range(2):
        background, colour, *_ = _colours(chance)
        canvas = blank(width, height, shade(background, chance))
        shape = str(chance.choice(SHAPES))
        figure = _in_cell(chance, shape, colour, int(chance.integers(9)), width, height)
        draw(canvas, figure, shade(colour, chance))
        things.append((colour, shape))
        frames.append(finished(canvas, chance))
    questions = []
    for number, thing in zip(("first", "second"), things, strict=True):
        colour, shape = thing
        questions.append(Question("pair", f"What is in the {number} image?", _thing(thing)))
        questions.append(Question("pair", f"What colour is the shape in the {number} image?", f"It is {colour}."))
        if things[0][1] != things[1][1]:
            questions.append(Question("pair", f"Which image shows a {shape}?", f"The {number} image."))
    return Sight(np.stack(frames), False, questions)


def clip(chance: np.random.Generator, width: int, height: int, frames: int) -> Sight:
    """A clip: something changes its colour, or moves."""
    return (_changing if chance.random() < 0.5 else _moving)(chance, width, height, frames)


def _changing(chance: np.random.Generator, width: int, height: int, frames: int) -> Sight:
    """Colours one after another, each for two frames or more, of the whole picture or of a shape in it."""
    background, *rest = _colours(chance)
    count = int(chance.integers(2, frames // 2 + 1))
    lasting = 2 + chance.multinomial(frames - 2 * count, np.full(count, 1 / count))
    order = rest[:count]
    shape = str(chance.choice(SHAPES)) if chance.random() < 0.5 else None
    figure = _in_cell(chance, shape or "circle", "", int(chance.integers(9)), width, height)
    behind, shades = shade(background, chance), {colour: shade(colour, chance) for colour in order}
    made = []
    for colour in np.repeat(order, lasting).tolist():
        canvas = blank(width, height, behind if shape else shades[colour])
        if shape:
            draw(canvas, figure, shades[colour])
        made.append(finished(canvas, chance))
    questions = [
        Question("order", "Which colours are shown, in order?", f"{', '.join(order).capitalize()}."),
        Question("order", "Which colour comes first?", f"The first colour is {order[0]}."),
        Question("order", "Which colour comes last?", f"The last colour is {order[-1]}."),
        Question("order", "Which colours are shown, in order?", f"{', '.join(order).capitalize()}."),
    ]
    return Sight(np.stack(made), True, questions)


def _moving(chance: np.random.Generator, width: int, height: int, frames: int) -> Sight:
    background, colour, *_ = _colours(chance)
    shape = str(chance.choice(SHAPES))
    said = str(chance.choice(list(DIRECTIONS)))
    x_way, y_way = DIRECTIONS[said]
    radius = min(width, height) * chance.uniform(0.12, 0.2)
    room_x, room_y = width - 2 * radius, height - 2 * radius
    way = chance.uniform(0.5, 1.0)
    start_x = radius + room_x * _start(chance, x_way, way)
    start_y = radius + room_y * _start(chance, y_way, way)
    behind, tone = shade(background, chance), shade(colour, chance)
    made = []
    for done in np.linspace(0, way, frames):
        canvas = blank(width, height, behind)
        x, y = start_x + room_x * done * x_way, start_y + room_y * done * y_way
        draw(canvas, Figure(shape, colour, x, y, radius), tone)
        made.append(finished(canvas, chance))
    questions = [
        Question("motion", f"In which direction does the {shape} move?", f"The {shape} moves {said}."),
        Question("motion", "Where does the shape move?", f"The {shape} moves {said}."),
        Question("motion", "What moves?", _thing((colour, shape))),
        Question("motion", f"In which direction does the {shape} move?", f"The {shape} moves {said}."),
    ]
    return Sight(np.stack(made), True, questions)


def _start(chance: np.random.Generator, direction: int, way: float) -> float:
    """Where a move of this length along an axis may begin, as a share of the room."""
    if direction == 0:
        return chance.uniform(0, 1)
    spare = chance.uniform(0, 1 - way)
    return spare if direction > 0 else 1 - spare
