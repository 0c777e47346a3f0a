"""Cards: JSON files with the provenance of a table."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.errors import TableError
from perfmodel.ingest.tables import write_json
from perfmodel.measure.tables._rows import SUSPECT
from perfmodel.measure.timing import StoppingRule

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Final = 1
"""Version of the tables' columns and of the card itself."""
LICENCE: Final = "Apache-2.0"
"""Licence of the tables that this package writes."""
UNITS: Final = {
    "time_us": "us",
    "time_us_std": "us",
    "bytes": "bytes",
    "ci95_half_width": "share of time_us",
    "interference": "share of processor time",
}
"""Units of columns that have one; all others are counts, names or flags."""


def machine() -> dict[str, str | int]:
    """CPU model, logical cores and architecture."""
    return {
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "architecture": platform.machine(),
    }


def software(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, the system and packages; those not installed are left out."""
    # Nobody need have installed both JAX and torch.
    versions = {"python": platform.python_version(), "system": platform.system()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    """The CPU's name, from Linux or else from Python."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or "unknown"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Provenance of one table."""

    table: str
    """File name, in the card's own folder."""
    table_sha256: str
    """Checksum of the table, which shows whether the table was changed."""
    rows: int
    suspect_rows: int
    """Number of rows that stayed above the interference limit, which their `variant` marks; they
    are not fitted."""
    schema_version: int
    """`SCHEMA_VERSION` of the release that wrote it."""
    units: dict[str, str]
    """Units of the table's columns."""
    device: str
    """Device that was measured."""
    machine: dict[str, str | int]
    """Machine on which it was measured: CPU, cores, accelerator."""
    software: dict[str, str]
    """Versions of the measuring software."""
    collector: str
    """Package that measured it."""
    collector_sha256: str
    """Checksum of its sources: rows of other code do not go into one table."""
    method: dict[str, Any]
    """Stopping rule, and how calls were timed."""
    licence: str
    date: str
    """Day of the measurement in ISO 8601."""


def card_path(table: Path) -> Path:
    """Path of a table's card: `x.card.json` of `x.csv`."""
    return table.with_name(table.name.split(".", 1)[0] + ".card.json")


def collector_sha256() -> str:
    """Hash of the measuring code: this package's sources and the timed programs."""
    # Names and separators go in too, so that moving code from one file to another changes the hash.
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for source in (*sorted(package.rglob("*.py")), *sorted(package.with_name("ops").glob("*.py"))):
        place = source.relative_to(package.parent).as_posix()
        digest.update(place.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def write_card(
    path: Path,
    table: "pd.DataFrame",
    rule: StoppingRule,
    method: dict[str, Any],
    *,
    packages: Sequence[str] = (),
    accelerator: str | None = None,
) -> Card:
    """Write the card of the table at `path`, which must be there already.

    Args:
        packages: Python packages whose versions belong to the measurements.
        accelerator: name of the accelerator as its driver gives it.

    Raises:
        TableError: if the table is empty or names more than one device.
    """
    # A card says on which device every row was measured.
    devices = table["device"].unique() if len(table) else []
    if len(devices) != 1:
        raise TableError(f"{path}: a card must have rows of exactly one device, got {len(devices)}")
    card = Card(
        table=path.name,
        table_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        rows=len(table),
        suspect_rows=int(table["variant"].str.startswith(SUSPECT).sum()),
        schema_version=SCHEMA_VERSION,
        units={name: unit for name, unit in UNITS.items() if name in table},
        device=str(devices[0]),
        machine={**machine(), **({"accelerator": accelerator} if accelerator else {})},
        software=software(packages),
        collector="perfmodel.measure",
        collector_sha256=collector_sha256(),
        method={**asdict(rule), **method},
        licence=LICENCE,
        date=date.today().isoformat(),
    )
    write_json(card_path(path), asdict(card))
    return card


def read_card(path: Path) -> Card:
    """Read the card of the table at `path` and check that they belong together.

    Raises:
        TableError: if the card is missing, malformed, of another schema version, or the table is
            not the one that it describes.
    """
    json_path = card_path(path)
    if not path.is_file():
        raise TableError(f"{path}: no such table")
    try:
        card = Card(**json.loads(json_path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise TableError(f"{json_path}: not a readable card ({error})") from None
    if card.schema_version != SCHEMA_VERSION:
        raise TableError(
            f"{json_path}: schema version {card.schema_version}, this release reads {SCHEMA_VERSION}"
        )

    # A table that was edited, or copied over another one, has lost its provenance.
    if (
        card.table != path.name
        or card.table_sha256 != hashlib.sha256(path.read_bytes()).hexdigest()
    ):
        raise TableError(
            f"{path}: the table does not match its card {json_path.name}; measure again, or restore the table"
        )
    return card
