"""Requests to a server, from keywords or a job file.

All requests of a prediction have one length. The element types in which a server keeps weights and
cache are here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from perfmodel import catalog
from perfmodel.catalog import checked_fields
from perfmodel.catalog.job_files import JobFile
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Cluster, Framework, Layout, Model
from perfmodel.spec.framework_facts import HostCosts
from perfmodel.spec.notation import written_values
from perfmodel.units import DTYPE_BYTES, require_whole

Batching = Literal["continuous", "static"]
"""`continuous`: a request that ends makes room for the next, whose prompt is read between the steps
of the others (Orca, OSDI 2022, section 3); `static`: all requests of a batch start and end
together."""
WEIGHT_BYTES: Final = {
    name: float(DTYPE_BYTES[name]) for name in ("fp32", "bf16", "fp16", "fp8", "int8")
} | {
    "fp4": 0.5 + 1 / 16,
    "int4": 0.5 + 2 / 128,
}
"""Bytes of a weight: 4-bit floats share a scale of 8 bits among 16 (NVFP4), 4-bit integers one of
16 bits among 128 (AWQ, arXiv 2306.00978)."""
CACHE_DTYPES: Final = ("fp32", "bf16", "fp16", "fp8", "int8")
SERVER_LAYOUT: Final = ("tp", "pp", "dp", "ep", "etp", "order", "partition")
"""Fields of a layout that a server can have."""
PAGE_TOKENS: Final = 16
"""Tokens of a block of the paged cache; a sequence occupies whole blocks (vLLM, arXiv 2309.06180,
section 4.1; `block_size`)."""
PREFILL_TOKENS: Final = 8192
"""Most tokens of prompts that a step reads together (vLLM's `max_num_batched_tokens` and
TensorRT-LLM's `max_num_tokens` by default): several short prompts, or a part of a longer one."""
NEEDED: Final = (
    "serve: give a cluster, prompt_tokens and output_tokens, or a job file that states them"
)
"""Message for a missing cluster, prompt or output length."""
MEMORY_SHARE: Final = 0.9
"""Share of a device's memory that a server uses (vLLM's `gpu_memory_utilization`)."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Keywords of `serve`."""

    prompt_tokens: int | None = None
    """Tokens per prompt."""
    output_tokens: int | None = None
    """Tokens generated per request."""
    batch: int | None = None
    """Requests in flight over all replicas; by default as many as fit and meet the limits."""
    batching: Batching = "continuous"
    """`continuous`: a new request starts when another ends; `static`: all start and end
    together."""
    weight_dtype: str = ""
    """Narrower element type for the weights in memory: fp8, int8, int4 or fp4."""
    kv_dtype: str = ""
    """Element type of the key-value cache, such as fp8."""
    ttft_limit_s: float | None = None
    """Longest time to first token."""
    tpot_limit_s: float | None = None
    """Longest time per output token."""
    step_overhead_s: float = 0.0
    """Time between steps for scheduling and sampling."""
    dtype: str = ""
    """Element type of matrix products; by default the first of bf16, fp16 and fp32 that the device
    supports."""

    def requests(self, cluster: Cluster, batch: int) -> "Requests":
        """Make the requests, with `batch` of them in flight on a cluster.

        Raises:
            PerfModelError: a word that is needed is missing, or cannot be.
        """
        if self.prompt_tokens is None or self.output_tokens is None:
            raise PerfModelError(NEEDED)
        return Requests(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            batch=batch,
            batching=self.batching,
            dtype=self.dtype or cluster.device.usual_dtype,
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
        )


class ServingKeywords(TypedDict, total=False):
    """Fields of `ServingOptions`, for editors and type checkers."""

    prompt_tokens: int | None
    output_tokens: int | None
    batch: int | None
    batching: Batching
    weight_dtype: str
    kv_dtype: str
    ttft_limit_s: float | None
    tpot_limit_s: float | None
    step_overhead_s: float
    dtype: str


SERVING_KEYS: Final = tuple(field.name for field in fields(ServingOptions) if field.name != "dtype")
"""Keys of `[serving]` of a job file; the element type of products is the job's."""


def serving_options(file: JobFile) -> dict[str, Any]:
    """Values of `[serving]` of a job file.

    Raises:
        PerfModelError: an unknown word, or a value that it cannot have; names the file.
    """
    return checked_fields(ServingOptions, file.serving, f"{file.place} [serving]", SERVING_KEYS)


def server_layout(layout: str) -> tuple[str, tuple[str, ...]]:
    """The part of a training layout that a server can have, and the names of the other fields.

    Raises:
        LayoutError, UnknownNameError: as `Layout.stated`.
    """
    stated = Layout.stated(layout)
    server = {name: value for name, value in stated.items() if name in SERVER_LAYOUT}
    return written_values(server), tuple(name for name in stated if name not in SERVER_LAYOUT)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests of equal length, and how they are served."""

    prompt_tokens: int
    output_tokens: int
    batch: int
    """Requests in flight together, over all replicas."""
    batching: Batching = "continuous"
    dtype: str = "bf16"
    """Element type of the layers' products."""
    weight_dtype: str = ""
    """Element type of the layers' weights in memory, which are widened to `dtype` when read; empty:
    `dtype` itself."""
    kv_dtype: str = ""
    """Element type of the cache; empty: that of stored activations."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("prompt_tokens", "output_tokens", "batch")}
        # Far beyond any server, so a larger number is a slip.
        require_whole("serve", sizes, most=10**7)
        if self.batching not in get_args(Batching):
            raise PerfModelError(
                f"serve: batching must be {' or '.join(get_args(Batching))}, got {self.batching!r}"
            )
        for what, name, known in (
            ("weight dtype", self.weight_dtype, WEIGHT_BYTES),
            ("cache dtype", self.kv_dtype, CACHE_DTYPES),
        ):
            if name and name not in known:
                raise UnknownNameError(what, name, known)
        # Weights are widened on the way to the matrix units, never narrowed: that would be another
        # product type.
        if self.dtype in WEIGHT_BYTES and self.weight_bytes > WEIGHT_BYTES[self.dtype]:
            raise PerfModelError(
                f"serve: weight dtype {self.weight_dtype} is wider than dtype {self.dtype}; use a weight dtype of "
                "at most that width, or a wider dtype"
            )

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of the layers."""
        return WEIGHT_BYTES[self.weight_dtype or self.dtype]

    @property
    def tokens(self) -> int:
        """Total tokens of a request: prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class ServingProblem:
    """A model on a cluster, and the requests to serve."""

    model: Model
    cluster: Cluster
    layout: str
    """Layout of the job file; empty without one."""
    options: ServingOptions
    framework: Framework
    calibration: Path | str | None


def serving_problem(
    model: Model | JobFile | str,
    cluster: Cluster | str | None,
    keywords: Mapping[str, Any],
    *,
    calibration: Path | str | None,
    framework: Framework | None,
) -> ServingProblem:
    """Make a serving problem; `keywords` override a job file.

    Keywords that are None or empty are not stated.

    Raises:
        UnknownNameError: a name that is not in the catalog, an unknown word.
        PerfModelError: no cluster.
    """
    stated = {name: value for name, value in keywords.items() if value not in (None, "")}
    # Keywords come from users too, so slips are named here.
    known = {field.name for field in fields(ServingOptions)}
    unknown = next((name for name in stated if name not in known), None)
    if unknown:
        raise UnknownNameError("keyword of a server", unknown, known)
    model_or_name: Any = model
    layout = ""
    file = catalog.unfiled(model)
    if file is not None:
        file_options = serving_options(file)
        if "dtype" in file.problem_fields:
            file_options["dtype"] = file.problem_fields["dtype"]
        # Direct arguments override the file.
        stated = file_options | stated
        model_or_name = file.problem_fields.get("model", "")
        cluster = cluster or file.problem_fields.get("cluster")
        layout = server_layout(file.layout)[0] if file.layout else ""
    if cluster is None:
        raise PerfModelError(NEEDED)
    options = ServingOptions(**stated)
    return ServingProblem(
        model=catalog.model(model_or_name) if isinstance(model_or_name, str) else model_or_name,
        cluster=catalog.cluster(cluster) if isinstance(cluster, str) else cluster,
        layout=layout,
        options=options,
        framework=framework or Framework(host=HostCosts(step_overhead_s=options.step_overhead_s)),
        calibration=calibration,
    )
