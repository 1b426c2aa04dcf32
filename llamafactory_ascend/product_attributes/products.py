"""What can be on a picture, as data: one kind of product, in a number and a colour, sound or flawed."""

import itertools
import random
from dataclasses import dataclass

KINDS = {"cup": "杯子", "bottle": "瓶子", "box": "盒子", "button": "纽扣"}
COLOURS = {
    "red": "红色",
    "yellow": "黄色",
    "green": "绿色",
    "blue": "蓝色",
    "purple": "紫色",
    "black": "黑色",
}
FLAWS = {"none": "无", "scratch": "划痕", "crack": "裂纹", "stain": "污渍", "chip": "缺口"}
MOST = 5  # of one product on a picture
TRAIN, EVALUATION = 160, 40


@dataclass(frozen=True)
class Product:
    """What one picture shows.

    Attributes:
        number: the picture's, over both parts.
        kind, colour, flaw: keys of KINDS, COLOURS and FLAWS.
        count: 1 to MOST, in a row from left to right.
        flawed: which of them has the flaw, from 1; 0 where there is none.
    """

    number: int
    kind: str
    colour: str
    count: int
    flaw: str
    flawed: int

    @property
    def file(self) -> str:
        return f"{self.number:03}.png"


def split(seed: int) -> tuple[list[Product], list[Product]]:
    """Return the products to train on and those to evaluate on.

    Kind, colour, count and flaw together occur once in all: no picture of one part answers for one of the
    other, while every single value occurs in both, as far as chance allows.
    """
    stream = random.Random(f"products {seed}")
    every = list(itertools.product(KINDS, COLOURS, range(1, MOST + 1), FLAWS))
    found = [
        Product(number, kind, colour, count, flaw, 0 if flaw == "none" else stream.randint(1, count))
        for number, (kind, colour, count, flaw) in enumerate(stream.sample(every, TRAIN + EVALUATION))
    ]
    return found[:TRAIN], found[TRAIN:]
