"""``llamafactory-ascend data``: the data sets a recipe names."""

import typer

from llamafactory_ascend.cli import (
    data_check,
    data_edit,
    data_from_docs,
    data_from_llm,
    data_ls,
    data_make,
    data_stats,
)

EPILOG = """
Examples:

  llamafactory-ascend data check my_set --dataset-dir data

  llamafactory-ascend data stats train.yaml

  llamafactory-ascend data ls --dataset-dir data

  llamafactory-ascend data make product_attributes data/product_attributes

Exit codes: each command's --help says what they mean.
"""

app = typer.Typer(help="Look after the data sets that recipes name.", no_args_is_help=True, epilog=EPILOG)
app.command("make", epilog=data_make.EPILOG)(data_make.make)
app.command("check", epilog=data_check.EPILOG)(data_check.check)
app.command("stats", epilog=data_stats.EPILOG)(data_stats.stats)
app.command("from-docs", epilog=data_from_docs.EPILOG)(data_from_docs.from_docs)
app.command("from-llm", epilog=data_from_llm.EPILOG)(data_from_llm.from_llm)
app.command("ls", epilog=data_ls.EPILOG)(data_ls.ls)
app.command("add", epilog=data_edit.ADD_EPILOG)(data_edit.add)
app.command("remove", epilog=data_edit.REMOVE_EPILOG)(data_edit.remove)


@app.callback()
def data() -> None:
    """Look after the data sets that recipes name."""
