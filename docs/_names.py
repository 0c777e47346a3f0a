"""The page of all public names, a line for each."""

import inspect
import re

import perfmodel


def names_page() -> str:
    """Every name of `perfmodel`, with the sentence that its documentation begins with."""
    classes, functions = [], []
    for name in dir(perfmodel):
        if name.startswith("__"):
            continue
        value = getattr(perfmodel, name)
        line = f"| `pm.{name}` | {first_sentence(value)} |"
        # Two tables: what is called, and what is returned.
        (classes if inspect.isclass(value) else functions).append(line)
    head = ["| name | what it is |", "|---|---|"]
    parts = [
        "# All names of the package",
        "`import perfmodel as pm`; the pages of the reference have arguments and fields.",
        "## Functions",
        "\n".join([*head, *functions]),
        "## Records",
        "\n".join([*head, *classes]),
    ]
    return "\n\n".join(parts) + "\n"


def first_sentence(value: object) -> str:
    """The first sentence of a value's docstring, on one line."""
    # A docstring's first paragraph may have several lines and sentences.
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    sentence = re.match(r".*?[.;](?=\s|$)", paragraph)
    text = sentence[0] if sentence else paragraph
    return f"{text.rstrip('.;')}.".replace("|", "\\|")
