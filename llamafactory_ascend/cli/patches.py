"""``llamafactory-ascend patches``: what the plugin replaces in the host, as Markdown."""

import typer

from llamafactory_ascend.patching import Patch

EPILOG = """
Examples:

  llamafactory-ascend patches

  llamafactory-ascend patches > docs/patches.md

Exit code: 0.
"""


def patches() -> None:
    """List every replacement of a host function, why it exists and when it can go, as Markdown.

    Whether they fit this installation is what `llamafactory-ascend doctor` says.
    """
    from llamafactory_ascend import plugins

    found = [patch for patches in plugins.manager().hook.ascend_patches() for patch in patches]
    typer.echo(markdown(sorted(found, key=lambda patch: patch.id)), nl=False)


def markdown(patches: list[Patch]) -> str:
    """Return the page on the patches: a table, one row each."""
    rows = [
        f"| `{patch.id}` | {'<br>'.join(f'`{target}`' for target in patch.targets)} | {_cell(patch.why)} "
        f"| {_cell(patch.remove_when)} | {f'[link]({patch.upstream})' if patch.upstream else ''} "
        f"| {', '.join(sorted(set(patch.tested.values())))} |"
        for patch in patches
    ]
    return "\n".join([*HEAD, *rows]) + "\n"


HEAD = (
    "# Patches",
    "",
    "What the plugin replaces in LLaMA-Factory, Transformers and Accelerate while a process runs; the files",
    "installed stay as they are. Where several places are given, the first that defines the function counts.",
    "Its parameters are compared with those the patch was made for: other parameters, no patch.",
    "",
    "`llamafactory-ascend doctor` says how each stands in an installation. This page is made by `make docs`.",
    "",
    "| patch | replaces | what stock does | can go when | upstream | tested with |",
    "| --- | --- | --- | --- | --- | --- |",
)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
