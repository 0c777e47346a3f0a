"""The command line: `perfmodel COMMAND ...`. Imports stay lazy so that --help is immediate."""

from perfmodel.cli._main import main as main
