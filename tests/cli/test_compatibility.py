"""Versions against each other."""

import pytest

from llamafactory_ascend.cli.compatibility import judge, requirements


def said(versions: dict[str, str], **required: list[str]) -> list[tuple[str, str, str]]:
    return [(found.subject, found.message, found.hint) for found in judge(versions, required)]


def test_what_the_host_asks_for() -> None:
    wanted = ["transformers!=4.57.0,<=5.6.0,>=4.55.0", "trl<=0.24.0", "deepspeed>=9; extra == 'deepspeed'"]
    assert said({"transformers": "5.6.0", "trl": "0.24.0", "deepspeed": "0.16"}, llamafactory=wanted) == []
    ((subject, message, hint),) = said({"transformers": "5.8.0"}, llamafactory=wanted)
    assert subject == "transformers" and message.startswith("5.8.0 is installed, llamafactory asks for ")
    assert "<=5.6.0" in message and hint.startswith("pip install 'transformers")


def test_installed_host_says_what_it_asks_for() -> None:
    asked = requirements()
    assert any(line.startswith("wrapt") for line in asked["llamafactory-ascend-plugin"])


@pytest.mark.parametrize(
    ("versions", "subject", "fragment"),
    [
        ({"torch": "2.10.0+cpu", "torch_npu": "2.7.1.post2"}, "torch_npu", "made for torch 2.7.1"),
        ({"torch": "2.9.1"}, "torch", "every model with a Conv3d"),
        ({"triton": "3.2.0", "triton-ascend": "3.2.0"}, "triton", "share one folder"),
        (
            {"torch": "2.8.0", "torch_npu": "2.8.0", "flash-linear-attention": "0.4.2"},
            "flash-linear-attention",
            "0.4.2 has no kernels for Ascend",
        ),
        ({"llamafactory": "0.9.5", "llamafactory-kt": "0.9.6.dev0"}, "llamafactory", "same import package"),
    ],
)
def test_pairs_that_break(versions: dict[str, str], subject: str, fragment: str) -> None:
    ((found, message, _hint),) = said(versions)
    assert found == subject and fragment in message


def test_pairs_that_fit() -> None:
    fitting = {"torch": "2.10.0", "torch_npu": "2.10.0rc1", "flash-linear-attention": "0.5.2"}
    assert said({**fitting, "triton-ascend": "3.2.0"}) == []


def test_a_version_that_cannot_be_read_is_named() -> None:
    """What an interrupted pip leaves behind has no metadata, and so no version."""
    wanted = ["torch>=2.4"]
    ((subject, message, hint),) = said(
        {"torch": "of unknown version", "torch_npu": "2.8.0"}, llamafactory=wanted
    )
    assert subject == "torch" and message.startswith("its version cannot be read")
    assert hint == "pip install --force-reinstall --no-deps torch"
