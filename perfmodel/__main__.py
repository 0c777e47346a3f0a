"""`python -m perfmodel`: the command line."""

import sys

from perfmodel.cli import main

if __name__ == "__main__":
    sys.exit(main())
