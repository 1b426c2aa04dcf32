"""The shipped data sets as a ``dataset_dir`` of their own, wherever the user wants one.

A wheel keeps its data deep inside site-packages, and pictures are not shipped at all: a recipe needs a folder
that has a name.
"""

import difflib
import errno
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llamafactory_ascend import product_attributes, resources
from llamafactory_ascend.errors import AscendError

INFO = "dataset_info.json"
SETS = {  # what can be made -> its entries in dataset_info.json
    "vertical_demo": ("vertical_demo", "vertical_demo_eval", "vertical_cpt_demo"),
    product_attributes.NAME: (product_attributes.NAME, f"{product_attributes.NAME}_eval"),
    "ascend_qa": ("ascend_qa", "ascend_qa_eval"),
    "long_demo": ("long_demo",),
}


@dataclass(frozen=True)
class Made:
    """What was made: the folder, its data sets with their number of rows, and how many pictures it has."""

    folder: Path
    rows: dict[str, int]
    pictures: int


def make(name: str, folder: Path, seed: int = product_attributes.SEED) -> Made:
    """Make ``folder`` with dataset_info.json, the data files and their pictures; all of it or nothing.

    Args:
        name: a key of SETS.
        seed: of pictures and questions; SEED gives the rows that are shipped.

    Raises:
        AscendError: no such set (with the nearest name), something is at ``folder`` already, or no Pillow.
    """
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, n=1)
        known = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(SETS)}"
        raise AscendError(f"there is no data set `{name}` to make: {known}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise _taken(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        built = Path(scratch) / folder.name
        built.mkdir()  # with the modes of any folder, which the temporary one has not
        made = _fill(built, name, seed)
        try:
            built.rename(
                folder
            )  # an empty folder gives way, a full one does not, whoever filled it meanwhile
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _taken(folder) from None
            raise
    return Made(folder, made.rows, made.pictures)


def _taken(folder: Path) -> AscendError:
    return AscendError(f"{folder} is there already; nothing was written", "name another folder, or remove it")


def _fill(folder: Path, name: str, seed: int) -> Made:
    shipped = resources.folder("dataset_info")
    entries = json.loads((shipped / INFO).read_text(encoding="utf-8"))
    info = {entry: entries[entry] for entry in SETS[name]}
    (folder / INFO).write_text(json.dumps(info, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    pictures = 0
    if name == product_attributes.NAME:
        product_attributes.write_rows(folder, seed)
        pictures = product_attributes.draw_pictures(folder, seed)
    else:
        for file in {entry["file_name"] for entry in info.values()}:
            (folder / file).write_bytes((shipped / file).read_bytes())
    rows = {
        entry: len(json.loads((folder / keys["file_name"]).read_text(encoding="utf-8")))
        for entry, keys in info.items()
    }
    return Made(folder, rows, pictures)
