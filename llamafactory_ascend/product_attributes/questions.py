"""Questions about a picture with their answers, as rows in the form of ``messages``."""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from llamafactory_ascend.product_attributes.products import COLOURS, FLAWS, KINDS, Product

ASKED = {
    "attributes": (
        '请以JSON给出图中商品的属性，键为"品类"、"颜色"、"数量"、"瑕疵"。',
        '提取商品属性，只输出JSON，键依次为"品类"、"颜色"、"数量"、"瑕疵"。',
    ),
    "count": ("图中有几件商品？", "请数一数图中的商品数量。"),
    "colour": ("图中的商品是什么颜色？", "请说出商品的颜色和品类。"),
    "flaw": ("图中的商品有没有瑕疵？是哪一种？", "请检查图中商品的外观。"),
    "where": ("哪一件商品有瑕疵？", "请指出有瑕疵的是左起第几件。"),
    "verdict": ("这批商品能通过外观检验吗？", "请给出外观检验结论：合格或不合格。"),
}


def attributes(product: Product) -> str:
    found = {
        "品类": KINDS[product.kind],
        "颜色": COLOURS[product.colour],
        "数量": product.count,
        "瑕疵": FLAWS[product.flaw],
    }
    return json.dumps(found, ensure_ascii=False)


def count(product: Product) -> str:
    return f"共有{product.count}件{KINDS[product.kind]}。"


def colour(product: Product) -> str:
    return f"是{COLOURS[product.colour]}的{KINDS[product.kind]}。"


def flaw(product: Product) -> str:
    return "没有瑕疵。" if product.flaw == "none" else f"有瑕疵，是{FLAWS[product.flaw]}。"


def where(product: Product) -> str:
    return "没有一件有瑕疵。" if product.flaw == "none" else f"左起第{product.flawed}件。"


def verdict(product: Product) -> str:
    if product.flaw == "none":
        return "合格。"
    return f"不合格：左起第{product.flawed}件有{FLAWS[product.flaw]}。"


ANSWERS: dict[str, Callable[[Product], str]] = {
    "attributes": attributes,
    "count": count,
    "colour": colour,
    "flaw": flaw,
    "where": where,
    "verdict": verdict,
}
# Every picture has the first conversation and one of the others, in turn.
FIRST = ("attributes",)
OTHERS = (("count",), ("colour", "count"), ("flaw", "where"), ("verdict",))


def rows(product: Product, pictures: str, seed: int) -> list[dict[str, Any]]:
    """Return the two conversations about a picture; its path is relative to the host's ``media_dir``."""
    stream = random.Random(f"questions {seed} {product.number}")
    found = []
    for topics in (FIRST, OTHERS[product.number % len(OTHERS)]):
        messages: list[dict[str, str]] = []
        for topic in topics:
            question = stream.choice(ASKED[topic])
            messages.append({"role": "user", "content": question if messages else f"<image>{question}"})
            messages.append({"role": "assistant", "content": ANSWERS[topic](product)})
        found.append({"messages": messages, "images": [f"{pictures}/{product.file}"]})
    return found


def as_lines(products: Iterable[Product], pictures: str, seed: int) -> list[str]:
    """Return every row of these products as one line of JSON."""
    return [
        json.dumps(row, ensure_ascii=False) for product in products for row in rows(product, pictures, seed)
    ]
