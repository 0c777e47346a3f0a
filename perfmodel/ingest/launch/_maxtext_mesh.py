"""MaxText's mesh: its axes within slices (`ici_`) and across them (`dcn_`) as degrees of
parallelism and back."""

from collections.abc import Mapping
from itertools import product
from typing import Any, Final, NamedTuple

from perfmodel.catalog import networks
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._table import BadValue, Fields

_AXES: Final = {
    "data": "data",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "expert": "ep",
    "context": "cp",
    "sequence": "cp",
    "tensor": "tp",
    "tensor_transpose": "tp",
    "tensor_sequence": "tp",
    "pipeline": "pp",
    "autoregressive": "",
    "context_autoregressive": "",
}
"""Mesh axes and the dimension that each is. Experts' ranks are replicas for everything else, as
`ep` of `dp` here."""
_MESHES: Final = ("ici", "dcn")
_MOST_EXPERT_RANKS: Final = 10**6
"""More ranks than any job spreads experts over, which makes their axis take all ranks."""
_SEQUENCE: Final = "ici_tensor_sequence_parallelism"
"""Tensor parallelism that shards norms along the sequence."""
MESH_KEYS: Final = tuple(f"{mesh}_{axis}_parallelism" for mesh, axis in product(_MESHES, _AXES))
"""Keys of the axes' degrees."""


class _Axes(NamedTuple):
    """Axes of a mesh, within slices and across them together."""

    sizes: dict[str, int]
    """Degree of each axis, as far as it is stated."""
    open: set[str]
    """Axes that take the remaining devices."""
    slices_are_open: bool
    """Whether the file leaves the number of slices to the machine."""
    slices_are_nodes: bool
    """Whether it does so, and each slice is a node of GPUs."""


def _axes(settings: Mapping[str, Any]) -> _Axes:
    """Multiply the degrees of every axis (raises `BadValue` for a value that is not a degree)."""
    sizes = {"data": 1, "fsdp": 1, "ep": 1, "cp": 1, "tp": 1, "pp": 1}
    open_axes: set[str] = set()
    # base.yml leaves fsdp open within a slice and data across slices. One axis of each mesh may be
    # open at most, so that an open data axis within slices closes that of fsdp.
    stated = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1} | dict(settings)
    if settings.get("ici_data_parallelism") == -1 and "ici_fsdp_parallelism" not in settings:
        stated["ici_fsdp_parallelism"] = 1
    # JAX calls a node of GPUs a slice; a file need not state the number of slices.
    slices_are_open = stated["dcn_data_parallelism"] == -1
    slices_are_nodes = str(stated.pop("hardware", "")).startswith("gpu") and slices_are_open
    for name, size in stated.items():
        axis = _AXES.get(name.split("_", 1)[1].removesuffix("_parallelism"), "")
        # Axes of inference are not axes of training.
        if name in ("shard_optimizer_over_data",) or not axis:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
            raise BadValue(f"must be -1 (all that are left) or a degree, got {size!r}")
        if size == -1:
            # The file does not state slices: an open axis across them counts as part of that within
            # them.
            open_axes.add(axis if name.startswith("ici_") else "")
        else:
            sizes[axis] *= size
    return _Axes(sizes, open_axes - {""}, slices_are_open, slices_are_nodes)


def mesh_degrees(settings: Mapping[str, Any]) -> Fields:
    """Degrees of parallelism and sharding by a mesh; an axis of -1 takes the remaining devices."""
    axes = _axes(settings)
    sizes, open_axes = axes.sizes, axes.open
    fields: Fields = {name: sizes[name] for name in ("tp", "pp", "cp", "ep")}
    fields["sequence_parallel"] = any(
        settings.get(f"{mesh}_tensor_sequence_parallelism", 1) > 1 for mesh in _MESHES
    )
    if sizes["pp"] > 1:
        # JAX differentiates the loop over all forwards: backwards begin when the last forward has
        # ended.
        fields["schedule"] = "gpipe"
    if not open_axes and axes.slices_are_open:
        fields["note.slices"] = (
            "one slice: the file leaves the number of slices (dcn_data_parallelism) to the machine; --devices sets more"
        )
    if not open_axes:
        # Ranks of the expert axis hold other tokens, so that they are replicas of all that is no
        # expert.
        fields["dp"] = sizes["data"] * sizes["fsdp"] * sizes["ep"]
    elif open_axes == {"ep"}:
        # Experts are spread over as many replicas as the devices make, within a node if each node
        # is a slice.
        fields["ep_most"] = (
            networks.DEVICES_PER_NODE if axes.slices_are_nodes else _MOST_EXPERT_RANKS
        )
        del fields["ep"]
    elif not open_axes <= {"data", "fsdp"}:
        raise BadValue(
            "must be a degree, because only data, fsdp and expert axes can take what is left; got -1"
        )
    return fields | _sharding(axes, shards_states=settings.get("shard_optimizer_over_data") is True)


def _sharding(axes: _Axes, shards_states: bool) -> Fields:
    """The ZeRO stage of a mesh, and the ranks over which it shards; `shards_states`: a setting for
    the data axis."""
    sizes, open_axes = axes.sizes, axes.open
    fields: Fields = {}
    # The fsdp axis shards weights and all that belongs to them, and so does that of experts
    # (`logical_axis_rules` of base.yml: `embed`); without these the data axis may shard optimizer
    # states.
    sharded = bool(open_axes & {"fsdp", "ep"}) or sizes["fsdp"] > 1 or sizes["ep"] > 1
    if sharded and not open_axes & {"fsdp", "ep"}:
        # The data axis holds copies of what the others shard, and so do further slices.
        fields["shard_ranks"] = sizes["fsdp"] * sizes["ep"]
    elif sharded and axes.slices_are_nodes:
        fields["shard_ranks"] = "node"
        fields["note.slices"] = (
            "each node is a slice that holds a copy of the weights, sharded over its devices"
        )
    elif sharded and sizes["data"] > 1:
        fields["replicate"] = sizes["data"]
    if sharded:
        fields["zero"] = 3
    else:
        fields["zero"] = int(shards_states)
    return fields


def write_mesh(fields: Fields) -> Mapping[str, Any]:
    """Degrees of the axes within a slice (raises `LaunchFileError` for a layout that MaxText's mesh
    cannot hold)."""
    if fields["zero"] == 2:
        raise LaunchFileError(
            "zero=2: MaxText has only zero=1 (optimizer states sharded on its data axis) and zero=3 (weights on "
            "its fsdp axis); use one of these"
        )
    # As `mesh_degrees` reads: replicas that are not expert ranks are copies (data) or shards
    # (fsdp).
    shards = fields["dp"] // fields["ep"]
    if fields["dp"] % fields["ep"]:
        raise LaunchFileError(
            f"ep={fields['ep']}: MaxText spreads experts over replicas, so ep must divide dp={fields['dp']}"
        )
    sharded = fields["zero"] == 3
    copies = fields["replicate"]
    if sharded and shards % copies:
        raise LaunchFileError(
            f"replicate={copies}: MaxText's data axis must divide dp/ep = {shards}"
        )
    if sharded and 1 < shards == copies and fields["ep"] == 1:
        raise LaunchFileError(
            "zero=3 with replicate=dp: no ranks are left for MaxText's fsdp axis; use a smaller replicate"
        )
    if not sharded and fields["ep"] > 1:
        raise LaunchFileError(
            f"zero={fields['zero']}: MaxText's expert axis also shards weights; use zero=3"
        )
    # dcn axes span slices; this file assumes a single slice.
    values = {
        "dcn_data_parallelism": 1,
        "ici_data_parallelism": copies if sharded else shards,
        "ici_fsdp_parallelism": shards // copies if sharded else 1,
        _SEQUENCE if fields["sequence_parallel"] else "ici_tensor_parallelism": fields["tp"],
        "ici_pipeline_parallelism": fields["pp"],
        "ici_context_parallelism": fields["cp"],
        "ici_expert_parallelism": fields["ep"],
    }
    return values | ({"shard_optimizer_over_data": True} if fields["zero"] == 1 else {})
