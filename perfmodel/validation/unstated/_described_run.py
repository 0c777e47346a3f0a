"""A run described by a row of a table or by the settings of a job.

Either states some of a run's cells. Open settings are filled in under each framework that may have
run it (`perfmodel.validation.unstated._completions`), in the same way for published rows and for
jobs of users.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from perfmodel import catalog
from perfmodel.catalog.job_files import JOB_WORDS
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.prediction import check_layout
from perfmodel.prediction.sites.constants import is_competition
from perfmodel.spec import Cluster, Device, Framework, Layout, Model, Transformer
from perfmodel.spec.notation import written
from perfmodel.validation.rows import (
    Case,
    Row,
    Unusable,
    cluster_of,
    framework_name,
    model_of,
    number,
    read_case,
    seq_len_of,
    text,
    with_plain_columns,
    with_shards_of_recipe,
)

DEGREES = ("tp", "pp", "dp", "cp")
FILLED_CELLS = (*DEGREES, "vpp", "micro_batch")
"""Cells of a layout that are filled in if they are empty."""


class DescribedRun(ABC):
    """A partly described run."""

    @property
    @abstractmethod
    def cells(self) -> Row:
        """Degrees, batch, element type, devices and schedule by the names of their columns; empty
        ones are None."""

    @property
    @abstractmethod
    def framework_name(self) -> str:
        """`name@year`, `name`, or empty."""

    @abstractmethod
    def model(self, framework: Framework) -> Model:
        """The model, under a framework."""

    @abstractmethod
    def seq_len(self, model: Model) -> int:
        """Tokens per sequence."""

    @abstractmethod
    def device(self) -> Device:
        """The device that runs it."""

    @abstractmethod
    def read(self, cells: Row, framework: Framework) -> Case:
        """The run under a framework, with open cells filled in.

        Raises:
            PerfModelError: the run states too little, or cannot be so.
        """

    def cells_for(self, framework: Framework) -> Row:
        """Cells completed by a framework's recipes."""
        return self.cells

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the run is known to have run out of memory or crashed."""
        return text(self.cells, "status") in ("oom", "oom_or_crash")

    @property
    def competes(self) -> bool:
        """Whether the run was submitted to a competition, for which layouts are always tuned."""
        return is_competition(text(self.cells, "source"))

    @property
    def year(self) -> int | None:
        """The year of the run, else of its framework; None if neither is known."""
        year = number(self.cells, "year")
        if year is not None:
            return int(year)
        _, _, stated = self.framework_name.partition("@")
        return int(stated) if stated.isdecimal() else None


@dataclass(frozen=True)
class RowRun(DescribedRun):
    """The run of a row of a table (`validate cases`, `fit --runs`)."""

    row: Row

    @property
    def cells(self) -> Row:
        return self.row

    @property
    def framework_name(self) -> str:
        return framework_name(self.row)

    def model(self, framework: Framework) -> Model:
        return model_of(self.row, framework).model

    def seq_len(self, model: Model) -> int:
        return seq_len_of(self.row, model)[0]

    def device(self) -> Device:
        return catalog.device(text(self.row, "device"))

    def read(self, cells: Row, framework: Framework) -> Case:
        return read_case(cells, framework)

    def cells_for(self, framework: Framework) -> Row:
        """Return the row's cells, with those that follow from the framework and the device."""
        cells = with_shards_of_recipe(self.row, framework)
        if self.device().vendor != "Google":
            return cells
        # Tables tell how many chips a TPU's host has. The slice bounds tensor parallelism, because
        # all its chips share links; a cluster of the catalog states its size (`JobRun`).
        cluster, _ = cluster_of(
            with_plain_columns(self.row), {}, f"run {text(self.row, 'case_id')}"
        )
        return {**cells, "devices_per_node": cluster.levels[0].size}


@dataclass(frozen=True)
class JobRun(DescribedRun):
    """The run of a job's settings (`predict --open`, a job file)."""

    stated_model: Model
    cluster: Cluster
    job: Mapping[str, Any]
    """Fields of `Job` that are stated, among them `global_batch`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout` that are stated."""
    framework: str = ""
    """`name@year`, `name`, or empty."""
    devices: int | None = None

    def __post_init__(self) -> None:
        # A user describes the job at the command line or in a file; mistakes are reported before
        # anything is filled in.
        unknown = set(self.job) - set(JOB_WORDS)
        if unknown:
            raise UnknownNameError("keyword of a job", min(unknown), JOB_WORDS)
        if self.job.get("global_batch") is None:
            raise PerfModelError(
                "global_batch is missing; give the sequences per step over all replicas"
            )
        if self.cluster.kinds:
            raise PerfModelError(
                f"cluster {self.cluster.name} has several kinds of nodes, which --open does not support; leave "
                "--open out"
            )

    @property
    def cells(self) -> Row:
        """The job as cells of a row in a table of published runs."""
        # The cells of a table's row, so that everything after this reads a job as it reads a
        # published run.
        stated = {name: self.layout.get(name) for name in FILLED_CELLS}
        devices = self.devices
        if devices is None:
            # Without a number of devices a degree that nobody states is 1, as in any layout.
            degrees = {name: int(self.layout.get(name, 1)) for name in DEGREES}
            stated |= degrees
            devices = prod(degrees.values())
        layers = None
        if isinstance(self.stated_model, Transformer):
            layers = self.stated_model.layers
        return stated | {
            "n_devices": devices,
            "devices_per_node": self.cluster.levels[0].size,
            "layers": layers,
            "global_batch": self.job["global_batch"],
            "dtype": self.job.get("dtype"),
            "schedule": self.layout.get("schedule"),
        }

    @property
    def framework_name(self) -> str:
        return self.framework

    def model(self, framework: Framework) -> Model:
        return self.stated_model

    def seq_len(self, model: Model) -> int:
        return self.job.get("seq_len") or model.seq_len

    def device(self) -> Device:
        return self.cluster.device

    def read(self, cells: Row, framework: Framework) -> Case:
        """The case of a row whose unstated cells were filled in."""
        # Cells that were filled in become fields of the layout beside those that are stated.
        values = dict(self.layout)
        for name in FILLED_CELLS:
            if cells.get(name) is not None:
                values[name] = cells[name]
        missing = [name for name in ("tp", "pp", "dp") if name not in values]
        if len(missing) > 1:
            raise Unusable(f"{', '.join(missing[:-1])} and {missing[-1]} are not stated")
        if missing:
            # A single missing degree follows from the devices and the other degrees.
            stated_product = prod(
                int(values.get(name, 1)) for name in DEGREES if name != missing[0]
            )
            values[missing[0]] = max(1, int(cells["n_devices"]) // stated_product)
        # Several model chunks per stage need a schedule that interleaves them.
        if values.get("vpp", 1) > 1:
            values.setdefault("schedule", "interleaved")
        notation = ",".join(f"{name}={written(value)}" for name, value in values.items())
        layout, _ = framework.layout(notation, self.stated_model)

        # Batch, length and element type have been filled into cells; all else is passed on as
        # stated.
        further_fields = {
            name: value
            for name, value in self.job.items()
            if name not in ("global_batch", "seq_len", "dtype")
        }
        job = framework.job(
            self.stated_model,
            self.cluster.device,
            global_batch=self.job["global_batch"],
            seq_len=self.job.get("seq_len"),
            dtype=cells.get("dtype"),
            **further_fields,
        )

        # A completion that cannot be laid out is refused here, and takes no part in the mixture.
        check_layout(self.stated_model, self.cluster, job, layout, int(cells["n_devices"]))
        return Case(
            case_id="",
            model=self.stated_model,
            cluster=self.cluster,
            job=job,
            layout=layout,
            framework=framework,
            stated_layout=notation,
            stated_job=frozenset(further_fields),
        )


def described_job(
    model: Model | str,
    cluster: Cluster | str,
    layout: Layout | str = "",
    *,
    framework: str = "",
    devices: int | None = None,
    **job: Any,
) -> JobRun:
    """Make a run from settings of a job; only model, cluster and global batch are required.

    Args:
        layout: stated part of the layout, in its notation. Degrees that it leaves out are open
            where `devices` says how many there are, else 1.
        framework: `name@year`, `name`, or empty where it is not known.
        job: fields of `Job` that are stated.

    Raises:
        UnknownNameError, PerfModelError: for names that no catalog has; without `global_batch`.
    """
    values: Mapping[str, Any] = {}
    if isinstance(layout, Layout):
        values = layout.values()
    elif layout:
        values = Layout.stated(layout)
    stated = {name: value for name, value in job.items() if value is not None}
    return JobRun(
        catalog.model(model), catalog.cluster(cluster), stated, values, framework, devices
    )
