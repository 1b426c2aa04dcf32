"""``llamafactory-ascend data make``: all of a data set or nothing, and never in place of something."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llamafactory_ascend import demo_data, product_attributes, resources
from llamafactory_ascend.cli import app


def make(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", "make", *words])


def test_text_set_is_copied_with_its_entries(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dataset_info"
    result = make("vertical_demo", str(folder))
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "vertical_demo: 90 rows\nvertical_demo_eval: 12 rows\nvertical_cpt_demo: 90 rows\n"
        f"in a recipe: dataset: vertical_demo, dataset_dir: {folder}\n"
    )
    shipped = resources.folder("dataset_info")
    for name in ("vertical_demo.json", "vertical_demo_eval.json"):
        assert (folder / name).read_bytes() == (shipped / name).read_bytes()
    assert list(json.loads((folder / "dataset_info.json").read_text())) == list(
        demo_data.SETS["vertical_demo"]
    )


def test_every_shipped_entry_can_be_made() -> None:
    entries = json.loads((resources.folder("dataset_info") / "dataset_info.json").read_text(encoding="utf-8"))
    entries.pop("soulchat_r1")  # the user's own
    assert [name for names in demo_data.SETS.values() for name in names] == list(entries)


@pytest.mark.parametrize("taken", ["a file", "a full folder"])
def test_what_is_there_stays(taken: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if taken == "a file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / "mine").write_text("mine")
    result = make("vertical_demo", str(folder))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error {folder} is there already; nothing was written\n  next: name another folder, or remove it\n"
    )
    assert (folder if taken == "a file" else folder / "mine").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [folder], "no scratch folder is left"


def test_an_empty_folder_is_filled_and_nobody_waits_for_its_parents(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert make("vertical_demo", str(tmp_path / "data")).exit_code == 0
    assert (tmp_path / "data" / "vertical_demo.json").is_file()


def test_a_folder_that_is_filled_meanwhile_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_rows = product_attributes.write_rows

    def somebody_else_too(folder: Path, seed: int) -> None:
        write_rows(folder, seed)
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "mine").write_text("mine")

    monkeypatch.setattr(product_attributes, "write_rows", somebody_else_too)
    result = make("product_attributes", str(tmp_path / "data"))
    assert result.exit_code == 2 and "is there already" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "mine"]


def test_unknown_set(tmp_path: Path) -> None:
    result = make("product_atributes", str(tmp_path / "x"))
    assert result.exit_code == 2 and "did you mean `product_attributes`?" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_shows_examples_and_exit_codes() -> None:
    result = make("--help")
    assert result.exit_code == 0 and "llamafactory-ascend data make product_attributes" in result.stdout
    assert "Exit codes" in result.stdout
