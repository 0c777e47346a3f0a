"""Platform options are set here once, before anything imports JAX."""

import os
from pathlib import Path

import hypothesis
import pytest

# examples are judged by their results: how long one takes says something of the machine's load only. A gate tells
# good code from bad by the same examples every time; PERFMODEL_EXPLORE=1 draws others
hypothesis.settings.register_profile("untimed", deadline=None, derandomize="PERFMODEL_EXPLORE" not in os.environ)
hypothesis.settings.load_profile("untimed")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

DATA = Path(os.environ.get("PERFMODEL_DATA", Path(__file__).parents[2] / "shared" / "data"))


LONGEST = ("test_live.py", "test_cases.py", "test_trace_program.py", "test_agents.py", "test_docs.py")
"""Files that take a minute or so: begun first, lest one worker waits for another's last file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The public measurement tables; the test is skipped, visibly, where they are absent."""
    if not (DATA / "devices.csv").exists():
        pytest.skip(f"measurement tables not found at {DATA}; set PERFMODEL_DATA")
    return DATA
