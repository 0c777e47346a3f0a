"""Kubernetes manifests of training jobs: the command of their containers, as a shell script, and
their devices.

Kinds differ in where they keep the template of a pod (`Job`, `PyTorchJob`, `MPIJob`, `JobSet`,
Volcano's `Job` and others), and agree in what a pod is: containers with a command, variables, and
the devices that each asks for.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.files import load_yaml_documents

_IS_MANIFEST: Final = re.compile(r"^\s*apiVersion:.*$[\s\S]*^\s*kind:", re.MULTILINE)
_COPIES: Final = ("replicas", "parallelism")
"""Keys that say how many copies of the pod below them run."""
_TPU: Final = "google.com/tpu"
_DEVICES: Final = ("nvidia.com/gpu", "amd.com/gpu", _TPU, "habana.ai/gaudi", "huawei.com/Ascend910")
"""Resources that are devices, as their makers' plugins call them."""
_SHELLS: Final = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
_REFERENCE: Final = re.compile(r"\$\(([A-Za-z_]\w*)\)")
"""How a manifest refers to a variable in a command."""
_END_OF_FILE: Final = "END_OF_FILE_OF_A_CONFIG_MAP"
_DEEPEST: Final = 40
"""Deepest nesting that is searched for containers."""


@dataclass(frozen=True)
class JobScript:
    """The script that the pods of a manifest run, with their devices."""

    text: str
    """A shell script with the variables, files and commands of the containers."""
    devices: int
    """Devices of all pods; 0 if they ask for none."""
    slices: int
    """Slices of TPUs that the pods are on, each of which is a copy of one group of pods."""
    kind: str = "Kubernetes manifest"
    """Kind of the file, for messages."""


@dataclass(frozen=True)
class _Container:
    table: Mapping[str, Any]
    pods: int
    groups: int
    """Number of copies of the group of pods."""


def job_script(text: str) -> JobScript | None:
    """The script that the containers of a manifest run; None for other files, and without any
    command."""
    if not _IS_MANIFEST.search(text):
        return None
    documents = [document for document in _documents(text) if isinstance(document, dict)]
    lines: list[str] = []
    containers: list[_Container] = []
    for document in documents:
        if document.get("kind") == "ConfigMap" and isinstance(document.get("data"), dict):
            lines += _files(document["data"])
        elif "apiVersion" in document:
            containers += _containers(document, 1, 1, 0)
    commands: list[str] = []
    devices = slices = 0
    for container in containers:
        device, number = _requested(container.table)
        devices += container.pods * number
        slices += container.groups if device == _TPU else 0
        command = _command(container.table)
        # Master and workers have the same command.
        if command and command not in commands:
            commands.append(command)
    return JobScript("\n".join([*lines, *commands]) + "\n", devices, slices) if commands else None


def _documents(text: str) -> list[Any]:
    """The documents of a file; none if it is not YAML.

    Raises:
        TooLargeError: aliases that multiply.
    """
    import yaml

    try:
        return load_yaml_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []


def _files(data: Mapping[str, Any]) -> Iterator[str]:
    """Lines that write the files of a `ConfigMap`, which containers find where it is mounted."""
    for name, content in data.items():
        if (
            isinstance(content, str)
            and re.fullmatch(r"[\w.-]+", str(name))
            and _END_OF_FILE not in content
        ):
            yield f"cat > {name} <<'{_END_OF_FILE}'\n{content.rstrip()}\n{_END_OF_FILE}"


def _containers(node: Any, pods: int, groups: int, depth: int) -> Iterator[_Container]:
    """Containers below a part of a manifest, with the number of pods that have them, and of groups
    of these."""
    if depth > _DEEPEST:
        return
    if isinstance(node, list):
        for part in node:
            yield from _containers(part, pods, groups, depth + 1)
        return
    if not isinstance(node, dict):
        return
    # What surrounds a template says how often its pod runs, unless the pod's own table is reached.
    listed = node.get("containers")
    if isinstance(listed, list):
        yield from (_Container(table, pods, groups) for table in listed if isinstance(table, dict))
        return
    for key in _COPIES:
        copies = node.get(key)
        if isinstance(copies, int) and not isinstance(copies, bool) and copies > 0:
            pods *= copies
            groups *= copies if key == "replicas" else 1
    for key, part in node.items():
        if key not in ("metadata", "status"):
            yield from _containers(part, pods, groups, depth + 1)


def _requested(container: Mapping[str, Any]) -> tuple[str, int]:
    """Kind and number of the devices that a container asks for."""
    resources = container.get("resources")
    for kind in ("limits", "requests"):
        asked = resources.get(kind) if isinstance(resources, dict) else None
        if not isinstance(asked, dict):
            continue
        for name in _DEVICES:
            number = str(asked.get(name, ""))
            if number.isdecimal():
                return name, int(number)
    return "", 0


def _command(container: Mapping[str, Any]) -> str:
    """The command of a container as lines of a shell script; empty if its image decides."""
    argv: list[str] = []
    for key in ("command", "args"):
        value = container.get(key)
        if isinstance(value, list):
            argv += [str(word) for word in value]
        elif value:
            argv.append(str(value))
    if not argv:
        return ""
    variables = _variables(container)
    argv = [
        _REFERENCE.sub(lambda reference: variables.get(reference[1], reference[0]), word)
        for word in argv
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # `bash -c SCRIPT` runs its text; a list of words is one command.
    if argv[0] in _SHELLS and len(argv) > 2 and re.fullmatch(r"-\w*c", argv[1]):
        return "\n".join([*exports, argv[2]])
    return "\n".join([*exports, shlex.join(argv)])


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a container's environment that the manifest states by value."""
    listed = container.get("env")
    variables: dict[str, str] = {}
    for entry in listed if isinstance(listed, list) else ():
        if (
            isinstance(entry, dict)
            and re.fullmatch(r"[A-Za-z_]\w*", str(entry.get("name")))
            and "value" in entry
        ):
            variables[str(entry["name"])] = str(entry["value"])
    return variables
