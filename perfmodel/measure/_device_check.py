"""Is the accelerator found the one that a plan names?"""

import re

from perfmodel import catalog
from perfmodel.errors import CalibrationError, PerfModelError


def check_device(planned: str, accelerator: str | None) -> None:
    """Refuse to write rows of one device under the name of another.

    Devices that no catalog knows are their planner's to name; those it knows must be found.

    Args:
        planned: the plan's `device`.
        accelerator: the name that its driver gives it; `None` for a CPU.

    Raises:
        CalibrationError: if the plan names a catalog device and another one is found.
    """
    try:
        known = catalog.device(planned)
    except PerfModelError:
        return
    if accelerator is None:
        if known.host_bandwidth_bytes_per_s is None and known.vendor != "Google":  # a CPU has no host
            return
        found = "a CPU"
    elif same_device(known.name, accelerator):
        return
    else:
        found = accelerator
    raise CalibrationError(
        f"the plan's device is {planned}, found {found}; run it there, or name the device found "
        "(any_device = true in the plan measures whatever is found)"
    )


def same_device(name: str, accelerator: str) -> bool:
    """Whether a catalog name and a driver's name may mean one device: chip alike, memory and form not at odds."""
    ours, theirs = _words(name), _words(accelerator)
    chips = [word for word in ours if re.fullmatch(r"[A-Z]*\d+[A-Z]*", word) and not _is_memory(word)]
    chip = chips[0] if chips else ours[0]
    if chip not in theirs:
        return False
    memory, their_memory = (list(filter(_is_memory, words)) for words in (ours, theirs))
    if memory and their_memory and memory != their_memory:
        return False
    return ("PCIE" in ours) == ("PCIE" in theirs) and ("NVL" in ours) == ("NVL" in theirs)


def _words(name: str) -> list[str]:
    """Upper-case words; `1080 Ti` is one, TPU's `v5 lite` is v5e, its plain `v5` is v5p."""
    name = re.sub(r"(v\d) lite", r"\1e", name.strip(), flags=re.IGNORECASE)
    name = re.sub(r"(TPU[ -]v5)$", r"\1p", name, flags=re.IGNORECASE)
    name = re.sub(r"(\d) Ti\b", r"\1Ti", name, flags=re.IGNORECASE)
    return re.split(r"[\s_-]+", name.upper())


def _is_memory(word: str) -> bool:
    return re.fullmatch(r"\d+GB", word) is not None
