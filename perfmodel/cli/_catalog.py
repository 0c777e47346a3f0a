"""`perfmodel catalog`: lists all names with their main figures, and all keys."""

import argparse
from itertools import chain
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_json
from perfmodel.cli._show import emit
from perfmodel.cli._vocabulary import VOCABULARY, entry_count, glossary, vocabulary
from perfmodel.display import new_console, say, table
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB, counted

if TYPE_CHECKING:
    from perfmodel.spec import Cluster, Device, Framework, Model, NetworkLevel

MOST_WIDTH = 100
"""Characters of a line of prose."""
KINDS = ("models", "clusters", "devices", "frameworks", *VOCABULARY)


def add_command(commands: Any) -> None:
    """The sub-command and its arguments."""
    command = commands.add_parser(
        "catalog",
        help="list the names of models, clusters, devices, frameworks and schedules, the keys of layouts and jobs, "
        "and the columns of tables",
    )
    command.add_argument(
        "kind",
        nargs="?",
        choices=KINDS,
        metavar="KIND",
        help=f"{', '.join(KINDS)} (default: the number of entries of each kind)",
    )
    command.add_argument(
        "word",
        nargs="?",
        default="",
        metavar="WORD",
        help="show only names that contain this",
    )
    add_json(command)
    command.set_defaults(run=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    """Print the entries of one kind, or how many entries each kind has."""
    if arguments.kind is None:
        return _kinds(arguments)
    records = entries(arguments.kind, arguments.word)
    if not records:
        raise PerfModelError(
            f"catalog: no name in {arguments.kind} contains {arguments.word!r}; "
            f"'perfmodel catalog {arguments.kind}' lists all"
        )

    # Entries that are words with a meaning read as a glossary, entries with figures as a table.
    console = new_console()
    if arguments.kind in VOCABULARY:
        lines = glossary(arguments.kind, records, min(console.width, MOST_WIDTH))
        emit(arguments, {arguments.kind: records}, lambda: say(*lines))
        return 0
    heads, cells = rows(arguments.kind, records)
    emit(arguments, {arguments.kind: records}, lambda: console.print(table("", heads, cells)))
    return 0


def _kinds(arguments: argparse.Namespace) -> int:
    """List the kinds of entries in the catalog, with their numbers."""
    counts = {kind: _number_of(kind) for kind in KINDS}

    def show() -> None:
        rows = [(kind, str(count), f"perfmodel catalog {kind}") for kind, count in counts.items()]
        new_console().print(table("", ("kind", "entries", "listed by"), rows))

    emit(arguments, {"kinds": counts}, show)
    return 0


def _number_of(kind: str) -> int:
    """Number of entries of a kind, without making their records, which would count the parameters
    of every model."""
    from perfmodel import catalog

    if kind in VOCABULARY:
        return entry_count(kind)
    if kind == "frameworks":
        return sum(len(catalog.framework_years(name)) for name in catalog.frameworks())
    names = {"models": catalog.models, "clusters": catalog.clusters, "devices": catalog.devices}
    return len(names[kind]())


def entries(kind: str, word: str = "") -> list[dict[str, Any]]:
    """Entries of the catalog whose name contains `word`, one record each, in SI units, as `--json`
    prints them."""
    from perfmodel import catalog

    if kind in VOCABULARY:
        return [record for record in vocabulary(kind) if word.lower() in record["name"].lower()]
    if kind == "frameworks":
        versions = chain.from_iterable(map(catalog.framework_versions, catalog.frameworks()))
        return [
            {"name": framework.name, **_framework(framework)}
            for framework in versions
            if word.lower() in framework.label
        ]

    # Each kind of entry: how to find one, all names, and the fields to show.
    functions_by_kind = {
        "models": (catalog.model, catalog.models, _model),
        "clusters": (catalog.cluster, catalog.clusters, _cluster),
        "devices": (catalog.device, catalog.devices, _device),
    }
    find, names, record = functions_by_kind[kind]
    return [
        {"name": name, **record(find(name))} for name in names() if word.lower() in name.lower()
    ]


def rows(kind: str, records: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The records as a table: headings and cells."""
    if kind == "models":
        heads = ("model", "kind", "parameters", "layers", "hidden", "sequence")
        return heads, [_model_cells(record) for record in records]
    if kind == "clusters":
        heads = ("cluster", "device", "per node", "network, from the inside")
        rows = []
        for record in records:
            levels = "; ".join(record["levels"])
            devices_per_node = f"{record['devices_per_node']:,}"
            rows.append((record["name"], record["device"], devices_per_node, levels))
        return heads, rows
    if kind == "frameworks":
        heads = ("framework", "steps", "attention", "own\ndefaults", "runs schedules")
        return heads, [_framework_cells(record) for record in records]
    heads = ("device", "memory", "memory bandwidth", "half precision", "fp32")
    return heads, [_device_cells(record) for record in records]


def _model_cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of a model."""
    return (
        record["name"],
        record["kind"],
        counted(record["parameters"]),
        _count(record["layers"]),
        _count(record["hidden"]),
        _count(record["seq_len"]),
    )


def _framework_cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of a framework, or of its state since a version."""
    facts = record["facts"]
    label = f"{record['name']}@{record['since']}" if record["since"] else record["name"]

    # A record lists only facts that differ from the generic framework's.
    attention = "unfused"
    if facts.get("flash_attention", True):
        attention = facts.get("attention", "fastest")
    schedules = ", ".join(facts.get("schedules", ())) or "all"
    return (
        label,
        facts.get("execution", "eager"),
        attention,
        str(len(facts)),
        schedules,
    )


def _device_cells(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of a device."""
    return (
        record["name"],
        f"{record['memory_bytes'] / GIB:,.0f} GiB",
        f"{record['memory_bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s",
        _teraflops(record["half_flops_per_s"]),
        _teraflops(record["fp32_flops_per_s"]),
    )


def _model(model: "Model") -> dict[str, Any]:
    """Return the figures of a model that the catalog's table shows."""
    from perfmodel.spec import Transformer
    from perfmodel.workload import parameter_count

    return {
        "kind": type(model).__name__,
        "parameters": parameter_count(model),
        "layers": getattr(model, "layers", None),
        "hidden": getattr(model, "hidden", None),
        "parallel_blocks": model.block.parallel_blocks if isinstance(model, Transformer) else None,
        "seq_len": model.seq_len,
    }


def _cluster(cluster: "Cluster") -> dict[str, Any]:
    """The figures of a cluster that the catalog's table shows."""
    kinds = cluster.kinds or (cluster,)
    levels = []
    for kind in kinds:
        # Mixed clusters have networks per kind of nodes, and one between the kinds.
        prefix = f"{kind.name}: " if cluster.kinds else ""
        levels += [f"{prefix}{level.name}: {_joined(level)}" for level in kind.levels]
    if cluster.between:
        levels.append(f"between kinds: {cluster.between.name}: {_joined(cluster.between)}")
    return {
        "device": " + ".join(kind.device.name for kind in kinds),
        "devices_per_node": cluster.devices_per_node,
        "levels": levels,
        "kinds": [
            {"name": k.name, "device": k.device.name, "devices": k.capacity} for k in cluster.kinds
        ],
    }


def _joined(level: "NetworkLevel") -> str:
    return f"{level.size} at {level.bandwidth_bytes_per_s / 1e9:,.4g} GB/s"


def _device(device: "Device") -> dict[str, Any]:
    """The figures of a device that the catalog's table shows."""
    peak = device.peak
    return {
        "vendor": device.vendor,
        "architecture": device.architecture,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "half_flops_per_s": peak.bf16 or peak.fp16,
        "fp32_flops_per_s": peak.fp32,
        "power_w": device.power_w,
        "idle_power_w": device.idle_power_w,
        "usd_per_hour": device.usd_per_hour,
        "price_source": device.price_source,
        "source": device.source,
    }


def _framework(framework: "Framework") -> dict[str, Any]:
    """Year, sources, and the facts in which a framework differs from `generic`."""
    from perfmodel.catalog.job_files import FRAMEWORK_FACTS
    from perfmodel.spec import Framework

    facts = framework.values()
    defaults = Framework().values()
    different = {name: facts[name] for name in FRAMEWORK_FACTS if facts[name] != defaults[name]}
    return {
        "since": framework.since,
        "sources": list(framework.sources),
        "facts": different,
    }


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _teraflops(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:,.4g} TFLOP/s"
