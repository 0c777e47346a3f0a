"""Run the notebooks and keep what they print and draw, so that a code host shows them
(`make notebooks`).

Kept are texts, tables and pictures. Left out are interactive pages, which code hosts do not run,
standard error, progress bars, and what changes from run to run without saying anything: times and
identifiers of executions.
"""

import sys
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

NOTEBOOKS: Final = Path(__file__).parent
CELL_LIMIT_S: Final = 300
LARGEST_CHARACTERS: Final = 100_000
"""Of a picture or table that is kept, as it stands in the file."""
KINDS: Final = ("text/plain", "text/html", "image/png")
NOT_SHOWN: Final = ("<iframe", "<progress")


def run(path: Path) -> None:
    """Run a notebook from top to bottom and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    # Cells name files relative to their own folder, wherever this is started.
    own_folder = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(
        notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources=own_folder
    ).execute()
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code_cells, start=1):
        cell.execution_count = count
        cell.metadata.pop("execution", None)
        cell.outputs = [shown_output(output, count) for output in cell.outputs if is_shown(output)]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


def is_shown(output: Any) -> bool:
    """Whether a code host shows anything of an output."""
    if output.output_type == "stream":
        return output.name == "stdout"
    if output.output_type not in ("display_data", "execute_result"):
        return True
    kinds = shown_kinds(output)
    # The text of an object that is HTML alone is its address.
    return bool(kinds) and not (
        kinds == ["text/plain"] and output.data["text/plain"].startswith("<IPython.core")
    )


def shown_kinds(output: Any) -> list[str]:
    """Representations of a result that are small enough and not interactive."""
    kinds = []
    for kind in KINDS:
        value = output.data.get(kind, "")
        is_static = not any(mark in value for mark in NOT_SHOWN)
        if value and is_static and len(value) <= LARGEST_CHARACTERS:
            kinds.append(kind)
    return kinds


def shown_output(output: Any, count: int) -> Any:
    """An output with nothing but what is shown."""
    if output.output_type in ("display_data", "execute_result"):
        output.data = {kind: output.data[kind] for kind in shown_kinds(output)}
        output.metadata = {}
    if output.output_type == "execute_result":
        output.execution_count = count
    return output


TIMED: Final = ("calibrate_this_machine.ipynb",)
"""Their outputs are times of the machine that ran them, which would mislead on another one."""

if __name__ == "__main__":
    kept_names = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb") if path.name not in TIMED)
    for name in sys.argv[1:] or kept_names:
        print(name, flush=True)
        run(NOTEBOOKS / name)
