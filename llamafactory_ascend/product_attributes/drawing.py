"""The pictures, drawn with Pillow: integer coordinates and one stream of random numbers for each."""

import random
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.product_attributes.products import MOST, Product

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT = 336, 224  # whole image tokens of 28 pixels: 12 x 8
FINE = 2  # drawn this many times larger and then reduced, so that edges are smooth
CELL = WIDTH * FINE // MOST
HALF_WIDTH, HALF_HEIGHT = 52, 76  # of a product, in fine pixels

BACKGROUNDS = ((246, 244, 238), (232, 238, 244), (240, 232, 224), (236, 240, 230))
PAINT = {
    "red": (204, 36, 40),
    "yellow": (240, 200, 30),
    "green": (40, 150, 70),
    "blue": (40, 90, 200),
    "purple": (130, 60, 170),
    "black": (44, 44, 48),
}
Box = tuple[int, int, int, int]  # left, top, right, bottom


def draw(product: Product, seed: int) -> "Image":
    """Return the picture of a product, RGB of 336 x 224.

    Raises:
        AscendError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise AscendError(
            "the pictures are drawn with Pillow, which is not here", "pip install pillow"
        ) from None

    stream = random.Random(f"picture {seed} {product.number}")
    background = stream.choice(BACKGROUNDS)
    image = Image.new("RGB", (WIDTH * FINE, HEIGHT * FINE), background)
    canvas = ImageDraw.Draw(image)
    left = (WIDTH * FINE - CELL * product.count) // 2 + CELL // 2
    for place in range(product.count):
        size = stream.randint(85, 100)  # per cent
        wide, high = HALF_WIDTH * size // 100, HALF_HEIGHT * size // 100
        x = left + place * CELL + stream.randint(-8, 8)
        y = HEIGHT * FINE // 2 + stream.randint(-90, 90)
        box = (x - wide, y - high, x + wide, y + high)
        SHAPES[product.kind](canvas, box, PAINT[product.colour], background)
        if place + 1 == product.flawed:
            MARKS[product.flaw](canvas, box, background, stream)
    return image.reduce(FINE)


def shade(paint: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (part * 7 // 10 for part in paint)
    return red, green, blue


def cup(canvas: Any, box: Box, paint: Any, background: Any) -> None:
    left, top, right, bottom = box
    top += 24
    canvas.ellipse((right - 26, top + 20, right + 14, bottom - 36), outline=shade(paint), width=10)
    canvas.polygon(((left, top), (right - 8, top), (right - 20, bottom), (left + 12, bottom)), fill=paint)
    canvas.ellipse((left, top - 12, right - 8, top + 12), fill=shade(paint))


def bottle(canvas: Any, box: Box, paint: Any, background: Any) -> None:
    left, top, right, bottom = box
    middle = (left + right) // 2
    canvas.rectangle((middle - 14, top + 10, middle + 14, top + 50), fill=paint)
    canvas.rectangle((middle - 18, top, middle + 18, top + 12), fill=shade(paint))
    canvas.rounded_rectangle((left + 12, top + 44, right - 12, bottom), radius=16, fill=paint)


def box_(canvas: Any, box: Box, paint: Any, background: Any) -> None:
    left, top, right, bottom = box
    top += 30
    canvas.polygon(
        ((left, top), (left + 18, top - 20), (right, top - 20), (right - 14, top)), fill=shade(paint)
    )
    canvas.rectangle((left, top, right - 14, bottom), fill=paint)
    canvas.polygon(
        ((right - 14, top), (right, top - 20), (right, bottom - 20), (right - 14, bottom)), fill=shade(paint)
    )


def button(canvas: Any, box: Box, paint: Any, background: Any) -> None:
    left, top, right, bottom = box
    x, y = (left + right) // 2, (top + bottom) // 2
    radius = (right - left) // 2
    canvas.ellipse(
        (x - radius, y - radius, x + radius, y + radius), fill=paint, outline=shade(paint), width=8
    )
    for dx in (-14, 14):
        for dy in (-14, 14):
            canvas.ellipse((x + dx - 6, y + dy - 6, x + dx + 6, y + dy + 6), fill=background)


SHAPES = {"cup": cup, "bottle": bottle, "box": box_, "button": button}


def middle_of(box: Box, stream: random.Random) -> tuple[int, int]:
    left, top, right, bottom = box
    return (left + right) // 2 + stream.randint(-8, 8), (top + bottom) // 2 + stream.randint(-4, 16)


def scratch(canvas: Any, box: Box, background: Any, stream: random.Random) -> None:
    """One straight thin light line."""
    x, y = middle_of(box, stream)
    rise = stream.choice((-1, 1)) * stream.randint(14, 26)
    canvas.line((x - 30, y - rise, x + 30, y + rise), fill=(250, 250, 250), width=5)


def crack(canvas: Any, box: Box, background: Any, stream: random.Random) -> None:
    """A light zigzag with a dark edge from top to bottom, to be seen on black and on yellow."""
    x, y = middle_of(box, stream)
    points = [(x + (10 if step % 2 else -10), y - 36 + 12 * step) for step in range(7)]
    canvas.line(points, fill=(20, 20, 20), width=9)
    canvas.line(points, fill=(250, 250, 250), width=3)


def stain(canvas: Any, box: Box, background: Any, stream: random.Random) -> None:
    """Three overlapping brown spots."""
    x, y = middle_of(box, stream)
    for dx, dy, radius in ((0, 0, 16), (14, 8, 10), (-12, 10, 9)):
        canvas.ellipse(
            (x + dx - radius, y + dy - radius, x + dx + radius, y + dy + radius), fill=(122, 84, 40)
        )


def chip(canvas: Any, box: Box, background: Any, stream: random.Random) -> None:
    """A bite in the lower left edge, in the colour of the background."""
    left, top, _right, bottom = box
    x, y = left + 16, (top + bottom) // 2 + stream.randint(10, 26)
    canvas.ellipse((x - 24, y - 20, x + 20, y + 20), fill=background)


MARKS = {"scratch": scratch, "crack": crack, "stain": stain, "chip": chip}
