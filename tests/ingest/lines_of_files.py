"""Lines of scripts that tests have in files beside them."""

from pathlib import Path


def lines_of(name: str) -> dict[str, list[str]]:
    """Lines by the heading that they stand under: one by one, or paragraphs that go on over several
    lines."""
    text = Path(__file__).with_name(name).read_text()
    lines: dict[str, list[str]] = {}
    heading = ""
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("# -- "):
            heading, *lines_below = paragraph.splitlines()
            lines[heading.removeprefix("# -- ")] = lines_below
        elif paragraph.startswith("# == "):
            heading = paragraph.removeprefix("# == ")
            lines[heading] = []
        else:
            lines[heading].append(paragraph)
    return lines
