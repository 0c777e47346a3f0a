"""Predicts one server: time to first token, time per token, throughput and memory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from perfmodel.catalog.job_files import JobFile
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.cost.learn import weight_files
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.prediction import Site
from perfmodel.prediction.sites import SitePrior
from perfmodel.serving._request import (
    SERVER_LAYOUT,
    Requests,
    ServingKeywords,
    ServingOptions,
    ServingProblem,
    serving_problem,
)
from perfmodel.serving._server import PARTS, Cost, Server, ServingMemory, serving_memory
from perfmodel.spec import Cluster, Framework, Layout, Model, Transformer
from perfmodel.units import GIB, positive

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Speed of a server on requests of one length (`Requests`), with 90 % intervals."""

    model: str
    cluster: str
    layout: Layout
    requests: Requests
    ttft_s: float
    """Time to first token: of a prompt that waits for those before it (`continuous`), or is read
    with all others of its batch (`static`)."""
    ttft_interval_s: Interval
    tpot_s: float
    """Mean time per output token after the first, including other requests' prompts that are read
    in between (`continuous`)."""
    tpot_interval_s: Interval
    decode_step_s: float
    """Time of a step that generates a token of every request, halfway through their outputs."""
    tokens_per_s: float
    """Output tokens per second of all requests together."""
    tokens_per_s_interval: Interval
    breakdown_s: dict[str, float]
    """Seconds of the decode step by part (`PARTS`)."""
    memory: ServingMemory

    @property
    def devices(self) -> int:
        return self.layout.devices

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices

    @property
    def tokens_per_s_per_user(self) -> float:
        """1 / time per output token."""
        return 1.0 / self.tpot_s

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `perfmodel serve --json` prints them."""
        requests, memory = self.requests, self.memory
        return {
            "model": self.model,
            "cluster": self.cluster,
            "layout": self.layout.label,
            "devices": self.devices,
            "prompt_tokens": requests.prompt_tokens,
            "output_tokens": requests.output_tokens,
            "batch": requests.batch,
            "batching": requests.batching,
            "dtype": requests.dtype,
            "weight_dtype": requests.weight_dtype or requests.dtype,
            "kv_dtype": requests.kv_dtype or None,
            "ttft_s": self.ttft_s,
            "ttft_lo_s": self.ttft_interval_s[0],
            "ttft_hi_s": self.ttft_interval_s[1],
            "tpot_s": self.tpot_s,
            "tpot_lo_s": self.tpot_interval_s[0],
            "tpot_hi_s": self.tpot_interval_s[1],
            "decode_step_s": self.decode_step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_lo": self.tokens_per_s_interval[0],
            "tokens_per_s_hi": self.tokens_per_s_interval[1],
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "tokens_per_s_per_user": self.tokens_per_s_per_user,
            "breakdown_s": self.breakdown_s,
            "memory_bytes": {
                "weights": memory.weights_bytes,
                "cache": memory.cache_bytes,
                "workspace": memory.workspace_bytes,
                "available": memory.available_bytes,
            },
            "most_requests": memory.most_requests,
            "fits": self.fits,
        }


def serve(
    model: Model | JobFile | str,
    cluster: Cluster | str | None = None,
    layout: Layout | str = "",
    *,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    **options: Unpack[ServingKeywords],
) -> Serving:
    """Predict a server of a decoder-only transformer.

        serve("llama3-70b", "dgx-h100", "tp=8", prompt_tokens=1024, output_tokens=256, batch=64)

    Args:
        model, cluster, layout, calibration: as `predict` takes them. `[serving]` of a job file
            supplies what is not given here. Of a layout, tp, pp, dp, ep and etp count.
        framework: supplies kernel gaps, memory and the time between steps (`step_overhead_s`); a
            generic server if not given.
        options: fields of `ServingOptions`; `prompt_tokens` and `output_tokens` are needed, `batch`
            divides by dp.

    Raises:
        UnknownNameError: a name that is not in the catalog, an unknown word.
        LayoutError: a layout that cannot serve the model.
        PerfModelError: a model that generates nothing, sizes that are not whole numbers, or limits
            that no batch holds.
    """
    # Without a batch the search starts from one request per replica.
    problem = serving_problem(model, cluster, options, calibration=calibration, framework=framework)
    layout = layout or problem.layout or "tp=1"
    laid_out = Layout.parse(layout) if isinstance(layout, str) else layout
    batch = problem.options.batch
    requests_in_flight = laid_out.dp if batch is None else batch
    server = server_of(problem, laid_out, requests_in_flight)
    return largest(server, problem.options) if batch is None else served(server)


def server_of(problem: ServingProblem, layout: Layout, batch: int) -> Server:
    """Check a problem, and return its server with `batch` requests in flight over all replicas.

    Raises:
        LayoutError: a layout that cannot serve the model.
        PerfModelError: a model that generates nothing, or requests that cannot be.
    """
    requests = problem.options.requests(problem.cluster, batch)
    model = _servable(problem.model, problem.cluster, layout, requests)
    weights = weight_files(problem.calibration)
    return Server(
        model=model,
        cluster=problem.cluster,
        layout=layout,
        requests=requests,
        framework=problem.framework,
        kernels=KernelModel.of(weights),
        collectives=CollectiveModel.of(weights),
    )


def _servable(model: Model, cluster: Cluster, layout: Layout, requests: Requests) -> Transformer:
    """Return the model if it can be served on this layout; raise otherwise."""
    if not isinstance(model, Transformer) or model.decoder_layers or not model.attention.causal:
        raise PerfModelError(
            f"serve: {model.name} generates no text; give a decoder-only transformer"
        )
    longest = max(model.seq_len, model.inputs.longest_seq_len)
    if model.inputs.positions == "learned" and requests.tokens > longest:
        raise PerfModelError(
            f"serve: prompt and output have {requests.tokens:,} tokens together, but {model.name} has only "
            f"{longest:,} positions; shorten them"
        )
    # Fields for training only (ZeRO, recomputation, virtual stages) must have their defaults.
    used = {name: layout.value(name) for name in SERVER_LAYOUT}
    if layout != Layout(**used):
        stated = layout.values()
        training_only = [name for name in stated if stated[name] != Layout(**used).value(name)]
        raise LayoutError(
            f"serve: a server's layout can have only tp, pp, dp, ep and etp; leave {', '.join(training_only)} out of "
            f"{layout.label}"
        )
    if requests.batch % layout.dp:
        nearest = max(1, round(requests.batch / layout.dp)) * layout.dp
        raise LayoutError(
            f"serve: batch {requests.batch} is not a multiple of dp={layout.dp}; the nearest is {nearest}"
        )
    if layout.pp > model.layers:
        raise LayoutError(
            f"{model.name} has {model.layers} layers; pp={layout.pp} is more than that; use fewer pipeline stages"
        )
    cluster.require(layout.devices, f"layout {layout.label}")
    cluster.device.require(requests.dtype)
    return model


def served(server: Server) -> Serving:
    """The prediction of a server."""
    requests = server.requests
    site_prior = Site().site_prior(server.framework, server.cluster.device)
    # Prefill gives the first token, decoding the others. Their context grows by one each; cost is
    # linear in it, so the one halfway stands for the mean.
    sequences = server.sequences
    more = requests.output_tokens - 1
    decode = server.decode(sequences, requests.prompt_tokens + -(-requests.output_tokens // 2))
    # All prompts are read together and nothing comes between the tokens.
    if requests.batching == "static":
        ttft = server.prefill(sequences)
        between = decode * 0.0
    else:
        # In a steady state every request that is served sees each other one's prompt once: before
        # its own (which delays the first token) or between its tokens.
        alone = server.prefill(1)
        other_costs = server.prompts_of_others()
        whole_s = (alone + decode * more + other_costs).total_s
        waited = _waiting_share(other_costs.total_s, whole_s, sequences)
        ttft = alone + other_costs * waited
        between = other_costs * (1.0 - waited)
    # Little's law: `batch` requests in flight, each of which takes `request_s`.
    request_s = ttft + decode * more + between
    tpot = (decode * more + between) * (1.0 / more) if more else decode
    tokens_per_s = requests.batch * requests.output_tokens / request_s.total_s
    low, high = request_s.interval(site_prior)
    return Serving(
        model=server.model.name,
        cluster=server.cluster.name,
        layout=server.layout,
        requests=requests,
        ttft_s=ttft.total_s,
        ttft_interval_s=_ends(ttft, site_prior),
        tpot_s=tpot.total_s,
        tpot_interval_s=_ends(tpot, site_prior),
        decode_step_s=decode.total_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_interval=(tokens_per_s / high, tokens_per_s / low),
        breakdown_s=dict(zip(PARTS, decode.parts_s.tolist(), strict=True)),
        memory=serving_memory(server),
    )


def _waiting_share(others_s: float, whole_s: float, sequences: int) -> float:
    """Share of the prompts of the others that a request waits for before its own is read; the rest
    are read between its tokens.

    Prompts queue for a server that reads one at a time in S seconds and is in use for a share r of
    the time: on average r S / (2 (1 - r)), Pollaczek and Khinchine's formula for a constant service
    time (Kleinrock, Queueing Systems I, 1975, section 5.6), and never for more than all others.
    """
    # Alone there is nobody to wait for.
    if sequences == 1:
        return 0.0
    utilisation = others_s / whole_s
    each_s = others_s / (sequences - 1)
    if utilisation >= 1.0:
        return 1.0
    return min(1.0, utilisation * each_s / (2.0 * (1.0 - utilisation)) / others_s)


def _ends(cost: Cost, site_prior: SitePrior) -> Interval:
    low, high = cost.interval(site_prior)
    return cost.total_s * low, cost.total_s * high


def largest(server: Server, limits: ServingOptions) -> Serving:
    """Find the largest number of requests in flight that fits and meets the `limits`, by bisection.

    Raises:
        PerfModelError: an invalid limit; not even one request a replica does; says by how much.
    """
    for name, limit_s in (
        ("time to first token", limits.ttft_limit_s),
        ("time per output token", limits.tpot_limit_s),
    ):
        if limit_s is not None:
            positive(f"serve: limit of the {name} in seconds", limit_s)
    # Whole batches per replica.
    step = server.layout.dp
    smallest_batch = served_with(server, step)
    reason = _exceeded(smallest_batch, limits)
    if reason:
        raise PerfModelError(f"serve: {server.model.name} on {server.layout.label}: {reason}")
    # The first try is all that fit: without a limit that binds it is the answer, and no bisection
    # is needed.
    low = 1
    high = max(1, smallest_batch.memory.most_requests // step)
    best, tried = smallest_batch, high
    while low < high:
        tried_batch = served_with(server, tried * step)
        if _exceeded(tried_batch, limits):
            high = tried - 1
        else:
            low, best = tried, tried_batch
        tried = (low + high + 1) // 2
    return best


def _exceeded(serving: Serving, limits: ServingOptions) -> str:
    """Reason why a server does not fit or meet the limits, with the remedy; empty if it does."""
    batch, memory = serving.requests.batch, serving.memory
    if not serving.fits:
        return (
            f"{batch} request(s) in flight need {memory.needed_bytes / GIB:.1f} GiB per device, but "
            f"{memory.available_bytes / GIB:.1f} are available; use more tp or pp, or narrower weights or cache"
        )
    for name, found_s, limit_s in (
        ("time to first token", serving.ttft_s, limits.ttft_limit_s),
        ("time per output token", serving.tpot_s, limits.tpot_limit_s),
    ):
        if limit_s is not None and found_s > limit_s:
            return f"{name} is {found_s:.4g} s at batch {batch}, above the limit of {limit_s:g} s"
    return ""


def served_with(server: Server, batch: int) -> Serving:
    """The server with another number of requests in flight."""
    return served(replace(server, requests=replace(server.requests, batch=batch)))
