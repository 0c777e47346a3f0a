"""A command that fine-tunes, and the number of processes that it starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.ingest.launch._arguments import listed_hosts, processes_in_variables
from perfmodel.ingest.launch._axolotl import AXOLOTL
from perfmodel.ingest.launch._entries import Entry, Neighbours
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY
from perfmodel.ingest.launch._megatron import scheduled_settings, world_of
from perfmodel.ingest.launch._open_instruct import over_nodes
from perfmodel.ingest.launch._swift import SWIFT
from perfmodel.ingest.launch.shell import Command

_PROCESSES: Final = ("nproc_per_node", "num_gpus", "num_processes")
_ALL_VISIBLE: Final = (LLAMA_FACTORY, AXOLOTL)
"""Front ends that start a process for every visible device."""


@dataclass(frozen=True)
class Training:
    """A command that fine-tunes."""

    command: Command
    form: LaunchFormat
    entries: dict[str, Entry]
    """Flags of the command, by names with underscores, and its `key=value` settings."""
    nodes: int = 1
    """Nodes on each of which a launcher of whole jobs starts the command."""


def world_entries(
    training: Training, job: Mapping[str, int], neighbours: Neighbours
) -> tuple[dict[str, Entry], list[str]]:
    """The number of processes, from the launcher, variables of front ends or the scheduler, and
    remarks on it."""
    command = training.command
    line = command.argv[0].line
    # Megatron's reader knows all launchers and schedulers; it is asked in its own notation, with
    # hyphens.
    entries = {name.replace("_", "-"): entry for name, entry in training.entries.items()}
    entries = listed_hosts(entries, neighbours) | entries
    settings: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    settings |= scheduled_settings(job)
    for name, number in processes_in_variables(command).items():
        settings.setdefault(name, number)
    if not any(name.replace("_", "-") in settings for name in _PROCESSES):
        devices = _visible(training)
        if devices:
            settings["nproc-per-node"] = devices
    fields = world_of(over_nodes(settings, training.nodes))
    remarks = [str(fields["note.devices"])] if "note.devices" in fields else []
    if "devices" not in fields:
        return {}, remarks
    world = {"num_processes": Entry(fields["devices"], line)}
    # The launcher's own number of nodes overrides the one in Accelerate's file.
    names = ("nnodes", "num-nodes", "num-machines", "sbatch-nodes")
    stated = [str(settings[name]) for name in names if str(settings.get(name)).isdecimal()]
    if stated:
        world["num_machines"] = Entry(int(stated[0]), line)
    return world, remarks


def doubts_on_spread_models(training: Training, world: Mapping[str, Entry]) -> tuple[str, ...]:
    """A doubt about processes of MS-Swift that see several devices each: every one of them puts its
    model on all of them, one layer after the other (`swift/utils/torch_utils.py`,
    `get_device_count`)."""
    listed = training.command.variables.get("CUDA_VISIBLE_DEVICES", "")
    is_on_torch = training.form is SWIFT and "deepspeed" not in training.entries
    if not is_on_torch or not world or not re.fullmatch(r"\d+(,\d+)*", listed):
        return ()
    visible = listed.count(",") + 1
    processes = int(world["num_processes"].value)
    if visible < 2 * processes:
        return ()
    return (
        f"the layout and memory may be wrong: each of the {processes} processes spreads its layers over "
        f"{visible // processes} of the {visible} visible devices, but one device for each process is predicted",
    )


def _visible(training: Training) -> int:
    """Number of devices visible to a launcher that uses all of them; 0 if unknown."""
    texts = [word.text for word in training.command.argv]
    for i, text in enumerate(texts):
        name, sign, value = text.partition("=")
        if name != "--include":
            continue
        # DeepSpeed's `host:0,1@other:0,1`; a host alone has all of its devices, and a variable
        # that nothing sets any number.
        hosts = value if sign else " ".join(texts[i + 1 : i + 2])
        parts = hosts.strip("'\"").split("@")
        if not all(re.fullmatch(r"[^:$]+:\d+(,\d+)*", part) for part in parts):
            return 0
        return sum(part.count(",") + 1 for part in parts)
    takes_all = training.form in _ALL_VISIBLE or any(
        text in ("accelerate", "deepspeed") for text in texts[:3]
    )
    listed = training.command.variables.get("CUDA_VISIBLE_DEVICES", "")
    if takes_all and re.fullmatch(r"\d+(,\d+)*", listed):
        return listed.count(",") + 1
    # With several devices one process may use one of them or all; with one there is no choice.
    return int(listed.isdecimal())
