"""SkyPilot's tasks: YAML with the shell script of every node (`run`), variables, and the devices of
the nodes."""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.files import load_yaml_documents
from perfmodel.ingest.launch._kubernetes import JobScript

_LOOKS_LIKE_ONE: Final = re.compile(r"^run:", re.MULTILINE)
_BESIDE: Final = ("resources", "num_nodes", "setup", "file_mounts", "workdir")
"""Keys of which every task has at least one besides its script."""


def task_script(text: str) -> JobScript | None:
    """The script that the nodes of a task run; None for other files."""
    if not _LOOKS_LIKE_ONE.search(text):
        return None
    task = _task(text)
    script = task.get("run")
    if not isinstance(script, str) or not any(key in task for key in _BESIDE):
        return None
    nodes = task.get("num_nodes", 1)
    nodes = nodes if isinstance(nodes, int) and not isinstance(nodes, bool) and nodes > 0 else 1
    resources = task.get("resources")
    per_node = _devices(resources.get("accelerators") if isinstance(resources, dict) else None)
    variables = {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes),
    }
    if per_node:
        variables["SKYPILOT_NUM_GPUS_PER_NODE"] = str(per_node)
    stated = task.get("envs")
    if isinstance(stated, dict):
        variables |= {str(name): str(value) for name, value in stated.items() if value is not None}
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in variables.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name)
    ]
    return JobScript(
        "\n".join([*exports, script]) + "\n", nodes * per_node, 0, kind="task of SkyPilot"
    )


def _task(text: str) -> Mapping[str, Any]:
    """The first table of a file; empty if it is not YAML.

    Raises:
        TooLargeError: aliases that multiply.
    """
    import yaml

    try:
        documents = load_yaml_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return next((document for document in documents if isinstance(document, dict)), {})


def _devices(accelerators: Any) -> int:
    """Devices of a node: `H100:8`, `H100`, or `{H100: 8}`; 0 if they are not stated or of several
    kinds."""
    if isinstance(accelerators, dict) and len(accelerators) == 1:
        number = next(iter(accelerators.values()))
        return (
            number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else 0
        )
    if not isinstance(accelerators, str):
        return 0
    _, sign, number = accelerators.partition(":")
    return int(number) if number.isdecimal() else int(not sign)
