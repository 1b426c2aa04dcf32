"""``llamafactory-ascend recipes``: what is shipped can be listed, printed and copied with overrides."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from llamafactory_ascend import resources
from llamafactory_ascend.cli import app

NAME = "qwen2_5_7b_lora_sft"
TEXT = resources.recipe(NAME).read_text(encoding="utf-8")


def recipes(*words: str) -> Result:
    return CliRunner().invoke(app, ["recipes", *words])


def test_ls_reads_the_headers_of_all_files() -> None:
    result = recipes("ls")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in resources.recipes())
    assert (
        "8 x 64 GB (Atlas A2)" in result.stdout and "LoRA fine-tuning of Qwen2.5-7B-Instruct" in result.stdout
    )


def test_ls_as_json() -> None:
    found = {one["name"]: one for one in json.loads(recipes("ls", "--json").stdout)}
    assert list(found) == list(resources.recipes())
    one = found["qwen3_8_27b_lora_sft_fsdp2"]
    assert one["command"] == "train" and one["cards"] == "8 x 64 GB (Atlas A2)"
    assert one["trains"].startswith("5,242,880 of 27,361,971,440 parameters")
    assert Path(one["file"]).read_text(encoding="utf-8").startswith(f"# {one['title']}\n")
    assert found["qwen2_5_7b_lora_export"]["command"] == "export"


def test_a_recipe_that_is_put_beside_the_others_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("# Does mine.\n#\n# model:  m\na: 1\n", encoding="utf-8")
    monkeypatch.setattr(resources, "folder", lambda name: tmp_path)
    (one,) = json.loads(recipes("ls", "--json").stdout)
    assert (one["name"], one["title"], one["model"]) == ("mine", "Does mine.", "m")
    assert recipes("ls").exit_code == 0


@pytest.mark.parametrize("name", [NAME, f"{NAME}.yaml", f"ascend:{NAME}"])
def test_cat_prints_the_file_as_it_is(name: str) -> None:
    assert recipes("cat", name).stdout == TEXT


@pytest.mark.parametrize("words", [("cat", "qwen2_5_7b_lora"), ("cp", "qwen2_5_7b_lora", "x.yaml")])
def test_unknown_name(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = recipes(*words)
    assert result.exit_code == 2 and "did you mean `qwen2_5_7b_lora_cpt` or" in result.stderr
    assert "llamafactory-ascend recipes ls" in result.stderr and list(tmp_path.iterdir()) == []
    assert result.stderr.count("qwen2_5_7b_lora_") <= 4, "a few names, not all"


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("my.yaml", "my.yaml"),
        ("new/deep/my.yml", "new/deep/my.yml"),
        ("new/", f"new/{NAME}.yaml"),
        (".", f"{NAME}.yaml"),
    ],
)
def test_cp_without_overrides_copies_to_the_byte(
    target: str, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = recipes("cp", NAME, target)
    assert result.exit_code == 0 and result.stdout == f"wrote {file}\n"
    assert Path(file).read_text(encoding="utf-8") == TEXT
    assert [path.name for path in Path(file).parent.iterdir()] == [Path(file).name], "no scratch file is left"


def test_cp_shows_and_applies_overrides(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    words = ("lora_rank=16", "learning_rate=5e-5", "ascend.strict=true", "upcast_layernorm=true")
    result = recipes("cp", NAME, str(file), *words)
    assert result.stdout == (
        "lora_rank: 16 (was 8)\n"
        "learning_rate: 5e-5 (was 0.0001)\n"
        "ascend.strict: true (not in the recipe before)\n"
        "upcast_layernorm: true (not in the recipe before)\n"
        f"wrote {file}\n"
    )
    found, before = yaml.safe_load(file.read_text(encoding="utf-8")), yaml.safe_load(TEXT)
    changed = {"lora_rank": 16, "learning_rate": "5e-5", "ascend": {"strict": True}}  # PyYAML's view of 5e-5
    assert found == {**before, **changed, "upcast_layernorm": True}
    assert file.read_text(encoding="utf-8").startswith(TEXT.split("\n\n")[0])


def test_cp_replaces_nothing_unasked_and_keeps_what_it_replaces(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("mine: 1\n", encoding="utf-8")
    refused = recipes("cp", NAME, str(file))
    assert refused.exit_code == 2 and file.read_text(encoding="utf-8") == "mine: 1\n"
    assert f"{file} is there already; nothing was written" in refused.stderr and "--force" in refused.stderr
    for number, before in (("", "mine: 1\n"), ("2", TEXT)):
        forced = recipes("cp", NAME, str(file), "--force")
        backup = tmp_path / f"my.yaml.bak{number}"
        assert forced.exit_code == 0 and f"what was there is in {backup}\n" in forced.stdout
        assert backup.read_text(encoding="utf-8") == before
    assert file.read_text(encoding="utf-8") == TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "my.yaml.bak", "my.yaml.bak2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my.txt",), "the host reads recipes from .yaml files only"),
        (("my.yaml", "lora_rank"), "`lora_rank` is no override"),
        (("my.yaml", "lora_rank.x=1"), "`lora_rank` is 8, no block of keys"),
        (("my.yaml", "lora_rank=[1"), "the value is not YAML"),
        (("my.yaml", "lora_rnk=4"), "the host has no key `lora_rnk`: did you mean `lora_rank` or"),
        (("my.yaml", "ascend.kernles=auto"), "unknown key `ascend.kernles`: did you mean `kernels`?"),
    ],
)
def test_nothing_is_written_on_a_mistake(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = recipes("cp", NAME, *words)
    assert result.exit_code == 2 and message in result.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["ls", "cat", "cp"])
def test_help_shows_examples_and_exit_codes(verb: str) -> None:
    result = recipes(verb, "--help")
    assert result.exit_code == 0 and f"llamafactory-ascend recipes {verb}" in result.stdout
    assert "Examples:" in result.stdout and "Exit code" in result.stdout
