"""Platform options are set here once, before anything imports JAX."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from perfmodel.session import current_session

# examples are judged by their results: how long one takes says something of the machine's load
# only. A gate tells good code from bad by the same examples every time; PERFMODEL_EXPLORE=1 draws
# others
EXPLORES = "PERFMODEL_EXPLORE" in os.environ
hypothesis.settings.register_profile(
    "untimed", deadline=None, derandomize=not EXPLORES, max_examples=500 if EXPLORES else 50
)
hypothesis.settings.load_profile("untimed")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What XLA has compiled once serves all workers, the processes that tests start, and later runs: a
# quarter of the time of files that compile much. It stands where the command line keeps its own
# (`session.cache_dir`), which drops what is not used; every program of other code, flags or
# versions has another name.
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfmodel"
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(os.environ.get("PERFMODEL_CACHE") or USER_CACHE) / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# A shell lets what it starts in the background ignore interrupts, and nohup lets it ignore
# hang-ups: processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# JAX and the tests themselves are a million objects that stay. At Python's default of 700 new
# objects, a tenth of the tests' time goes into looking for garbage among them.
COLLECTED_EVERY = 50_000
"""Objects that a process makes between two searches for reference cycles."""
gc.set_threshold(COLLECTED_EVERY)

DATA = Path(os.environ.get("PERFMODEL_DATA", Path(__file__).parents[2] / "shared" / "data"))


LONGEST = (
    "test_laws.py",
    "test_layout_laws.py",
    "test_end_to_end.py",
    "test_run_again.py",
    "test_wire.py",
    "test_emulated_scripts.py",
    "test_agents.py",
)
"""Files that take a minute or so: begun first, lest one worker waits for another's last file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no later search for garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The public measurement tables; the test is skipped, visibly, where they are absent."""
    if not (DATA / "devices.csv").exists():
        pytest.skip(f"measurement tables not found at {DATA}; set PERFMODEL_DATA")
    return DATA


MOST_RESIDENT_BYTES = 1.6e9
"""No test takes as much as is left to 2 GiB; what goes sooner than it must is compiled again and
again."""
GROWTH_BYTES = 0.4e9
RESIDENT_BYTES = [0.0]
"""After the last time that compiled code was dropped: what cannot go does not make every test
compile anew."""


@pytest.fixture(autouse=True)
def as_a_test_finds_it() -> Iterator[None]:
    """No test may leave JAX in another precision for the next one; what was compiled goes once it
    takes much memory."""
    yield
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        assert not jax.config.jax_enable_x64
        if resident_bytes() > max(MOST_RESIDENT_BYTES, RESIDENT_BYTES[0] + GROWTH_BYTES):
            current_session().clear()
            jax.clear_caches()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            RESIDENT_BYTES[0] = resident_bytes()


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """XLA tells a module's text, memory and FLOPs of what it compiles itself, not of what it finds
    compiled."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", was_enabled)
    compilation_cache.reset_cache()


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
