"""Problems: everything that a prediction needs but the layout."""

from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.spec._cluster import Cluster
from perfmodel.spec._framework import Framework
from perfmodel.spec._job import Job
from perfmodel.spec._layout import Layout
from perfmodel.spec._model import Model
from perfmodel.units import require_whole


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A job of a model on a cluster. `perfmodel.catalog.problem` makes one from names and
    keywords."""

    model: Model
    cluster: Cluster
    job: Job
    framework: Framework = field(default_factory=Framework)
    devices: int | None = None
    """Number of devices for the layout (the largest number where fewer are allowed); None: as many
    as it needs."""

    def __post_init__(self) -> None:
        # What the framework runs, and its defaults, depend on the job. Both are settled here, so
        # that every reader of the problem sees the same.
        object.__setattr__(self, "framework", self.framework.for_job(self.job))
        if self.job.cached_tokens and self.job.mode == "train":
            raise PerfModelError(
                "job: cached_tokens apply only to inference; set mode=inference, or cached_tokens=0"
            )
        if self.devices is not None:
            if self.devices < 1:
                raise PerfModelError(f"devices must be at least 1, got {self.devices}")
            require_whole("problem", {"devices": self.devices})

    def require_devices(self) -> int:
        """The number of devices; raises `PerfModelError` if it is not given."""
        if self.devices is None:
            raise PerfModelError("the number of devices is missing; give --devices N (devices=)")
        return self.devices

    def notation(self, layout: Layout) -> str:
        """The layout's notation, from which the framework reads the same layout for this
        model."""
        return self.framework.notation(layout, self.model)

    def replace(self, **changes: Any) -> "Problem":
        """A copy with some fields changed; `global_batch` changes the job."""
        # `global_batch` is a field of the job.
        if "global_batch" in changes:
            changes["job"] = replace(
                changes.get("job", self.job), global_batch=changes.pop("global_batch")
            )
        return replace(self, **changes)
