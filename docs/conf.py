"""The documentation site (`make docs`): Sphinx, with Markdown pages and notebooks by MyST."""

import os
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import _pages

import perfmodel

# Sphinx looks for pages when this file has run.
_pages.collect()
# notebooks run in a folder of their own: the studies of papers by their place
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "validate")

project = "perfmodel"
author = "The perfmodel developers"
version = release = perfmodel.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"perfmodel {version}"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
# Results of notebooks are kept for as long as the package does not change.
nb_execution_cache_path = str(
    Path(__file__).parents[1] / "out" / "notebooks" / _pages.fingerprint()
)
nb_execution_timeout = 300  # of a cell; the whole build has a limit in the Makefile
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# names that two facades share, in annotations; the page of the facade says which is meant
suppress_warnings = ["ref.python", "config.cache"]


def _plain_text(
    _app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Docstrings here are plain text with `code`."""
    lines[:] = _pages.escaped(lines)
    # Else what stands before a colon would be taken for a type.
    if what in ("attribute", "property"):
        lines.insert(0, "")


def _pictures_are_shown(app: Sphinx, error: Exception | None) -> None:
    """A picture that a notebook shows as its name only is an error."""
    pages = [] if error else (Path(app.outdir) / "notebooks").glob("*.html")
    # A figure that has no image is shown as the text by which matplotlib names it.
    without_image = [
        page.stem for page in pages if "&lt;Figure size" in page.read_text(encoding="utf-8")
    ]
    if without_image:
        names = ", ".join(without_image)
        raise ExtensionError(f"pictures without their image in the notebooks {names}")


def setup(app: Sphinx) -> None:
    """Connect what this site does beside its extensions."""
    app.connect("build-finished", _pictures_are_shown)
    app.connect("autodoc-process-docstring", _plain_text, priority=100)
