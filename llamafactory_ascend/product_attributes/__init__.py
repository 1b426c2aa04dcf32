"""A small image data set made on the spot: pictures of products, and questions about what is on them.

Everything follows from a seed. Only the rows are shipped (``dataset_info/``); the pictures are drawn where
somebody needs them, because half a megabyte of pictures belongs neither in a repository nor in a wheel.
"""

from pathlib import Path

from llamafactory_ascend.product_attributes import products, questions

NAME = "product_attributes"
SEED = 0  # of the rows that are shipped
PICTURES = "product_pictures"  # the folder of the pictures, in the rows too


def write_rows(folder: Path, seed: int) -> None:
    """Write both data files: the products of one are none of the other's."""
    train, evaluation = products.split(seed)
    for name, part in ((NAME, train), (f"{NAME}_eval", evaluation)):
        lines = questions.as_lines(part, PICTURES, seed)
        (folder / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def draw_pictures(folder: Path, seed: int) -> int:
    """Draw every picture of both files into ``folder/product_pictures``.

    Returns:
        How many there are.

    Raises:
        AscendError: Pillow is not installed.
    """
    from llamafactory_ascend.product_attributes import drawing

    pictures = folder / PICTURES
    pictures.mkdir()
    found = [product for part in products.split(seed) for product in part]
    for product in found:
        drawing.draw(product, seed).save(pictures / product.file, format="PNG")
    return len(found)
