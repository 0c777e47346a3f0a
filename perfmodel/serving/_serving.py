"""One server: time to first token, time per token, throughput, and what fits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.cost.learn import weight_files
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.prediction import Site
from perfmodel.serving._memory import ServingMemory, serving_memory
from perfmodel.serving._request import Batching, Requests
from perfmodel.serving._steps import PARTS, Cost, Server
from perfmodel.spec import USUAL_DTYPES, Cluster, Framework, Layout, Model, Transformer

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a server does with requests of one length (`Requests`), with 90 % intervals."""

    model: str
    cluster: str
    layout: Layout
    requests: Requests
    ttft_s: float
    """Time to first token: of a prompt that waits for half of the step under way (`continuous`), or is read with all
    others of its batch (`static`)."""
    ttft_interval_s: Interval
    tpot_s: float
    """Mean time per output token after the first, with the prompts of others that are read in between
    (`continuous`)."""
    tpot_interval_s: Interval
    decode_step_s: float
    """A step that generates a token of every request, halfway through their outputs."""
    tokens_per_s: float
    """Output tokens of all requests."""
    tokens_per_s_interval: Interval
    breakdown_s: dict[str, float]
    """The decode step by what it goes to."""
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

    def holds(self, ttft_limit_s: float | None, tpot_limit_s: float | None) -> bool:
        """Whether it fits and keeps the limits, as predicted."""
        return (
            self.fits
            and (ttft_limit_s is None or self.ttft_s <= ttft_limit_s)
            and (tpot_limit_s is None or self.tpot_s <= tpot_limit_s)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `perfmodel serve --json` prints them."""
        requests, memory = self.requests, self.memory
        return {
            "model": self.model,
            "cluster": self.cluster,
            "layout": str(self.layout),
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
    model: Model | str,
    cluster: Cluster | str,
    layout: Layout | str = "",
    *,
    prompt_tokens: int,
    output_tokens: int,
    batch: int,
    batching: Batching = "continuous",
    dtype: str | None = None,
    weight_dtype: str = "",
    kv_dtype: str = "",
    calibration: Path | str | None = None,
    framework: Framework | None = None,
) -> Serving:
    """Predict a server of a decoder-only transformer.

        serve("llama3-70b", "dgx-h100", "tp=8", prompt_tokens=1024, output_tokens=256, batch=64, dtype="fp8")

    Args:
        model, cluster, layout, calibration: as `predict` takes them; tp, pp, dp, ep and etp of a layout count.
        prompt_tokens, output_tokens: of every request.
        batch: requests in flight over all replicas, a multiple of dp.
        batching: whether requests take one another's places, or start and end together.
        dtype: of products; the first of bf16, fp16 and fp32 that the device has if not given.
        weight_dtype: narrower type of the layers' weights in memory (fp8, int8, int4, fp4), widened as they are read.
        kv_dtype: of the cache.
        framework: whose kernel gaps and memory count; a generic server's if not given.

    Raises:
        UnknownNameError: a name that no catalog has.
        LayoutError: a layout that cannot serve the model.
        PerfModelError: a model that generates nothing, or sizes that are no whole numbers.
    """
    found = model if not isinstance(model, str) else catalog.model(model)
    on = cluster if isinstance(cluster, Cluster) else catalog.cluster(cluster)
    requests = Requests(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, batch=batch, batching=batching,
        dtype=dtype or next((name for name in USUAL_DTYPES if name in on.device.dtypes), USUAL_DTYPES[0]),
        weight_dtype=weight_dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    return served(server_of(found, on, layout, requests, calibration, framework))


def server_of(
    model: Model, cluster: Cluster, layout: Layout | str, requests: Requests, calibration: Path | str | None = None,
    framework: Framework | None = None,
) -> Server:  # fmt: skip
    """The server, checked; see `serve`."""
    if not isinstance(model, Transformer) or model.decoder_layers or not model.causal:
        raise PerfModelError(f"serve: {model.name} generates no text; give a decoder-only transformer")
    if isinstance(layout, str):
        layout = Layout.parse(layout) if layout else Layout()
    if layout.cp > 1 or layout.sequence_parallel:
        raise LayoutError("serve: servers are laid out by tp, pp, dp, ep and etp; leave out cp and sequence_parallel")
    if requests.batch % layout.dp:
        nearest = max(1, round(requests.batch / layout.dp)) * layout.dp
        raise LayoutError(
            f"serve: batch {requests.batch} is not a multiple of dp={layout.dp}; the nearest is {nearest}"
        )
    if layout.pp > model.layers:
        raise LayoutError(f"{model.name} has {model.layers} layers; {layout.pp} pipeline stages are too many")
    cluster.require(layout.devices, f"layout {layout}")
    cluster.device.require(requests.dtype)
    weights = weight_files(Path(calibration) if isinstance(calibration, str) else calibration)
    return Server(
        model=model, cluster=cluster, layout=layout, requests=requests, framework=framework or Framework(),
        kernels=KernelModel.of(weights), collectives=CollectiveModel.of(weights),
    )  # fmt: skip


def served(server: Server) -> Serving:
    """The prediction of a server."""
    requests, site = server.requests, Site()
    sequences, more = server.sequences, requests.output_tokens - 1
    decode = server.decode(sequences, requests.prompt_tokens + -(-requests.output_tokens // 2))
    if requests.batching == "static":
        ttft, between = server.prefill(sequences), decode * 0.0
    else:
        waiting = 0.5 if sequences > 1 else 0.0
        ttft, between = server.prefill(1) + decode * waiting, server.others()
    whole = ttft + decode * more + between
    tpot = (decode * more + between) * (1.0 / more) if more else decode
    tokens = requests.batch * requests.output_tokens / whole.total_s
    low, high = whole.interval(site)
    return Serving(
        model=server.model.name,
        cluster=server.cluster.name,
        layout=server.layout,
        requests=requests,
        ttft_s=ttft.total_s,
        ttft_interval_s=_ends(ttft, site),
        tpot_s=tpot.total_s,
        tpot_interval_s=_ends(tpot, site),
        decode_step_s=decode.total_s,
        tokens_per_s=tokens,
        tokens_per_s_interval=(tokens / high, tokens / low),
        breakdown_s=dict(zip(PARTS, decode.parts_s.tolist(), strict=True)),
        memory=serving_memory(server),
    )


def _ends(cost: Cost, site: Site) -> Interval:
    low, high = cost.interval(site)
    return cost.total_s * low, cost.total_s * high


def at_batch(server: Server, batch: int) -> Serving:
    """The same server with another number of requests in flight."""
    return served(replace(server, requests=replace(server.requests, batch=batch)))
