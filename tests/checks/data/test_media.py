"""Media: both places are looked at, and placeholders are counted where the host counts them."""

from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.checks.data import schema
from llamafactory_ascend.checks.data.media import Media, placeholders

LAYOUT = schema.layout(
    {
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images", "videos": "videos"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
)


def row(text: str, images: Any = None, videos: Any = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
    return {"messages": messages, "images": images, "videos": videos}


def said(folder: Path, *rows: Any) -> list[str]:
    media = Media(LAYOUT, folder, placeholders({}))
    for number, one in enumerate(rows):
        media.see(number, one)
    return [problem.message for problem in media.problems("")]


def test_file_in_the_folder_or_where_its_path_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.png").touch()
    (tmp_path / "out.png").touch()
    monkeypatch.chdir(tmp_path)
    found = [
        row("<image>", ["in.png"]),
        row("<image>", ["out.png"]),
        row("<image>", [str(tmp_path / "out.png")]),
    ]
    assert said(tmp_path / "data", *found) == []
    (message,) = said(tmp_path / "data", *found, row("<image>", ["no.png"]))
    assert message == f"row 3: file not found: neither {tmp_path}/data/no.png nor {tmp_path}/no.png exists"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (row("<image><image>", ["a"]), "row 0: one image and 2 `<image>`"),
        (row("text", ["a", "a"]), "row 0: 2 images and no `<image>`"),
        (row("<image>"), "row 0: no image and 1 `<image>`"),
        (row("<image>", "a"), "row 0: `images` is a string, must be a list"),
        (row("<video>", None, [["a", "b"]]), f"row 0: file not found: neither {'{folder}'}/b nor"),
        (row("<image>", ["x" * 5000]), "row 0: file not found: neither"),  # no file can have such a name
        (row("<audio>"), "row 0: `<audio>` and no `audios` in `columns`"),
    ],
)
def test_counts_and_shapes(value: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (found,) = said(tmp_path, value)
    assert found.startswith(message.replace("{folder}", str(tmp_path)))


def test_placeholders_of_the_environment() -> None:
    assert placeholders({"IMAGE_PLACEHOLDER": "[img]"}) == {
        "images": "[img]",
        "videos": "<video>",
        "audios": "<audio>",
    }
