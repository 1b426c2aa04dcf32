"""`python -m tests.assets DIR [name ...]`: build the assets in DIR."""

import argparse
from pathlib import Path

from . import NAMES, build

parser = argparse.ArgumentParser(prog="python -m tests.assets", description="Build the tiny models and data.")
parser.add_argument("root", type=Path, metavar="DIR", help="folder to fill; what is there already is kept")
parser.add_argument("names", nargs="*", metavar="name", help=f"default: all of {', '.join(NAMES)}")
arguments = parser.parse_args()
try:
    build(arguments.root, arguments.names or None)
except ValueError as error:
    parser.error(str(error))
for name in arguments.names or NAMES:
    print(arguments.root / name)
