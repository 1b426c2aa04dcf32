"""The two READMEs: every command runs, every setting is there, and both say the same."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from llamafactory_ascend import settings
from tests.installed import ROOT, make_venv
from tests.running import Train, environment

PAGES = ("README.md", "README_zh.md")
# Commands that other tests run, because they take minutes or are this very suite.
ELSEWHERE = {"make demo": "tests/test_demo.py", "make test": ".ci/run"}

PRIVATE = {"LLAMAFACTORY_ASCEND_RUN", "LLAMAFACTORY_ASCEND_LOCKED"}  # from the launcher to its ranks


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.M | re.S)


def commands(page: str, language: str = "bash") -> list[str]:
    return [line for block in blocks(page, language) for line in block.splitlines()]


def headings(page: str) -> list[str]:
    return re.findall(r"^(#+) ", text(page), re.M)


def table(page: str, first: str) -> list[list[str]]:
    """Rows of every table whose first cell is a code word that starts with ``first``."""
    rows = re.findall(rf"^\| `({first}\w*)` \|(.*)\|$", text(page), re.M)
    return [[name, *(cell.strip() for cell in re.split(r"(?<!\\)\|", rest))] for name, rest in rows]


def as_written(value: object) -> str:
    """A default as a reader would write it in YAML, `off` without quotes: the settings read it either way."""
    if isinstance(value, BaseModel):
        return "{}"
    return value if isinstance(value, str) else yaml.safe_dump(value).splitlines()[0]


def test_pages_have_the_same_structure_and_blocks() -> None:
    english, chinese = PAGES
    assert headings(english) == headings(chinese)
    for language in ("bash", "docker", "npu", "yaml", "text"):
        assert blocks(english, language) == blocks(chinese, language)
    tagged = re.findall(r"^```(\w*)$", text(english), re.M)
    assert set(tagged) == {"bash", "docker", "npu", "yaml", "text", ""}
    figures = r"\d+(?:[.,]\d+)*"
    assert sorted(set(re.findall(figures, text(english)))) == sorted(set(re.findall(figures, text(chinese))))


@pytest.mark.parametrize("page", PAGES)
def test_settings_table_is_complete(page: str) -> None:
    rows = {name: cells for name, *cells in table(page, "[a-z]")}
    expected = {
        name: f"`{as_written(field.get_default(call_default_factory=True))}`"
        for name, field in settings.Settings.model_fields.items()
    }
    assert {name: cells[0] for name, cells in rows.items()} == expected
    if page == "README.md":
        described = {name: cells[1] for name, cells in rows.items()}
        assert described == {
            name: field.description for name, field in settings.Settings.model_fields.items()
        }


@pytest.mark.parametrize("page", PAGES)
def test_every_environment_variable_of_the_code_is_in_the_table(page: str) -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llamafactory_ascend").rglob("*.py"))
    found = set(re.findall(r'"(LLAMAFACTORY_\w+)"', code)) - PRIVATE
    assert {row[0] for row in table(page, "LLAMAFACTORY_")} == found


@pytest.mark.parametrize("page", PAGES)
def test_example_settings_are_valid(page: str) -> None:
    for block in blocks(page, "yaml"):
        recipe = yaml.safe_load(block)
        assert settings.read(recipe["ascend"], page).asked_for("checkpointing")


def anchors(page: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", text(page).lower(), re.M)
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", text(page))]
    assert targets and all((ROOT / path).exists() for path, *_ in targets)
    for path, _, anchor in targets:
        assert not anchor or anchor in anchors(path)


@pytest.mark.parametrize("page", PAGES)
def test_docker_and_npu_blocks_are_well_formed(page: str) -> None:
    """There is neither a container engine nor a card: syntax, file names and the recipe are checked."""
    for command in commands(page, "docker"):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        assert shlex.split(command)[:2] in (["docker", "build"], ["docker", "compose"])
    (build,) = [shlex.split(c) for c in commands(page, "docker") if c.startswith("docker build")]
    assert build[build.index("--build-arg") + 1].partition("=")[2] in text("Dockerfile")
    assert "train" in yaml.safe_load(text("compose.yaml"))["services"]
    (train,) = [shlex.split(command) for command in commands(page, "npu")]
    assert train[:2] == ["llamafactory-cli", "train"] and (ROOT / train[2]).is_file()


def see_packages_of_this_environment(python: Path) -> None:
    """Put our site-packages behind those of another environment, and the host's command into it."""
    site = next((python.parent.parent / "lib").glob("python*")) / "site-packages"
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    script = python.parent / "llamafactory-cli"
    script.write_text(f"#!{python}\nfrom llamafactory.cli import main\n\nmain()\n", encoding="utf-8")
    script.chmod(0o755)


def test_every_command_runs(train: Train, tmp_path: Path) -> None:
    """In the order of the page, in a copy of the checkout, on the simulated NPU; ``train.yaml`` is tiny.

    What pip installs goes into an environment of its own, which sees the packages of this one.
    """
    tree = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "tests", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=ignored)
    recipe = train.recipe(output_dir="saves/train", overwrite_output_dir=True, max_steps=2)
    (tree / "train.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    python = make_venv(tmp_path / "venv")
    see_packages_of_this_environment(python)
    env = {**environment(), "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    del env["LLAMAFACTORY_ASCEND"]

    output = {}
    for command in commands("README.md"):
        if command in ELSEWHERE:
            assert (ROOT / ELSEWHERE[command]).is_file()
            continue
        done = subprocess.run(
            ["bash", "-euc", command], cwd=tree, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        output[command] = done.stdout + done.stderr

    assert "Successfully installed llamafactory-ascend-plugin-" in output["pip install ."]
    for line in blocks("README.md", "text")[0].splitlines():
        pattern = ".+".join(re.escape(part) for part in line.split("…"))
        assert re.search(pattern, output["llamafactory-cli train train.yaml"]), line
    assert "llamafactory-ascend" not in output["LLAMAFACTORY_ASCEND=0 llamafactory-cli train train.yaml"]
    assert output["llamafactory-ascend check adapter saves/train"].endswith("whole\n")
    assert output["llamafactory-ascend doctor"].endswith("ok\n")
    assert (tree / "saves" / "train" / "ascend_report.json").is_file()
