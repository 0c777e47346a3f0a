"""A model server: step times of each pipeline stage, and memory.

A step reads prompts (prefill) or generates one token of every sequence (decode). Memory holds the
weights, the working memory of a step, and the cache of keys and values, which takes the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes, KernelModel, PricesCollectives, inference_times
from perfmodel.ops import Attention, Collective, MemoryBound, Op
from perfmodel.prediction import shard_events
from perfmodel.prediction.composition import Phase, Placement, Setting
from perfmodel.prediction.sites import SitePrior
from perfmodel.program import stage_blocks
from perfmodel.serving._request import (
    MEMORY_SHARE,
    PAGE_TOKENS,
    PREFILL_TOKENS,
    WEIGHT_BYTES,
    Requests,
)
from perfmodel.spec import Cluster, Framework, Job, Layout, Transformer
from perfmodel.units import dtype_bytes
from perfmodel.workload import layer_cache_bytes, storage_dtype

PARTS: Final = ("products", "attention", "experts", "element_wise", "communication", "gaps")
"""Parts of a step's time; `gaps`: the device waits between kernels."""
_PART_OF_FAMILY: Final = {"gemm": 0, "attention": 1, "moe": 2}
_ELEMENT_WISE, _COMMUNICATION, _GAPS = 3, 4, 5


@dataclass(frozen=True)
class Cost:
    """Seconds by part, with the data for their interval; costs can be added and scaled."""

    parts_s: Float[np.ndarray, "*stages parts"]
    uncertain_s: Float[np.ndarray, "*stages parts"]
    """Seconds of every part times the half-width of their 90 % interval."""
    shaky_s: Float[np.ndarray, "*stages 2"]
    """Seconds that are extrapolated, and seconds spent between nodes."""

    @property
    def total_s(self) -> float:
        return float(self.parts_s.sum())

    def __add__(self, addend: "Cost") -> "Cost":
        return Cost(
            self.parts_s + addend.parts_s,
            self.uncertain_s + addend.uncertain_s,
            self.shaky_s + addend.shaky_s,
        )

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.parts_s * factor, self.uncertain_s * factor, self.shaky_s * factor)

    @property
    def through(self) -> "Cost":
        """Cost of one pass through all stages."""
        return Cost(
            self.parts_s.sum(axis=0), self.uncertain_s.sum(axis=0), self.shaky_s.sum(axis=0)
        )

    @property
    def slowest(self) -> "Cost":
        """Cost of the stage that takes longest."""
        at = int(np.argmax(self.parts_s.sum(axis=1)))
        return Cost(self.parts_s[at], self.uncertain_s[at], self.shaky_s[at])

    def interval(self, site_prior: SitePrior) -> tuple[float, float]:
        """Ends of the 90 % interval as factors on the seconds. As in predictions of training steps,
        errors are common within a part and independent between parts and the site
        (`SitePrior.interval`)."""
        total_s = self.total_s
        # The uncertainty of each part is weighted by its share of the time, as for training steps.
        extrapolated, between_nodes = (self.shaky_s / total_s).tolist()
        products, attention, experts, element_wise, communication, gaps = (
            self.parts_s / total_s
        ).tolist()
        shares = {
            "products": products + experts,
            "attention": attention,
            "memory": element_wise,
            "host": gaps,
            "inter_node": between_nodes,
            "intra_node": max(0.0, communication - between_nodes),
        }
        half_widths = (self.uncertain_s / total_s).tolist()
        by_part: dict[str, float] = dict(zip(PARTS, half_widths, strict=True))
        interval = site_prior.interval(shares, by_part, {"extrapolated": extrapolated})
        return interval.lower, interval.upper


@dataclass(frozen=True, kw_only=True, eq=False)
class Server:
    """A model under a layout on a cluster, with event times."""

    model: Transformer
    cluster: Cluster
    layout: Layout
    requests: Requests
    framework: Framework
    kernels: KernelModel
    collectives: PricesCollectives

    @cached_property
    def sequences(self) -> int:
        """Requests in flight per replica."""
        return self.requests.batch // self.layout.dp

    def setting(self, tokens: int, cached: int, sequences: int) -> Setting:
        """The step that reads `tokens` new tokens of each sequence, after `cached` ones."""
        # A step of a server is an inference job whose sequences have `cached` tokens behind them,
        # so that attention reads the cache.
        dtype = self.requests.dtype
        job = Job(
            global_batch=sequences * self.layout.dp,
            seq_len=tokens,
            cached_tokens=cached,
            mode="inference",
            dtype=dtype,
            fp8_recipe="fused" if dtype in ("fp8", "fp4") else "",
        )
        return Setting.of(self.model, self.cluster, job, self.framework)

    def step(self, tokens: int, cached: int, sequences: int) -> Cost:
        """Cost of a step by stage; for prompts, only the last token's logits are computed."""
        costs = self._blocks(tokens, cached, sequences)
        # A server samples from the last position only, so the head's product has one row per
        # prompt, not one per token.
        if tokens > 1:
            last = self._blocks(1, 0, sequences)  # whose head is that of any token
            for values, last_values in zip(_arrays(costs), _arrays(last), strict=True):
                values[-1] = last_values[-1]
        layout = self.layout
        # One column per kind of block, one row per stage: costs of stages are counts times costs of
        # blocks.
        blocks = shard_events(
            self.setting(tokens, cached, sequences), layout.replace(micro_batch=sequences)
        )
        counts = stage_blocks(blocks.kinds, layout.pp, 1, layout.partition)[:, 0]
        staged = Cost(*(counts @ values for values in _arrays(costs)))
        # The server's own work (scheduling, sampling) is done once per step, before the first
        # stage.
        staged.parts_s[0, _GAPS] += self.framework.host.step_overhead_s
        return staged + self._sends(tokens * sequences) if layout.pp > 1 else staged

    def _blocks(self, tokens: int, cached: int, sequences: int) -> Cost:
        """Cost of every kind of block."""
        setting = self.setting(tokens, cached, sequences)
        blocks = shard_events(setting, self.layout.replace(micro_batch=sequences))
        # Embedding and head keep the wide type: engines quantise the layers' products alone.
        in_layers = np.asarray(blocks.counts[blocks.layers, Phase.FORWARD].any(axis=0))
        times = self._times(blocks.ops, in_layers)
        # Kernels that engines fuse into others do not run by themselves.
        counts = blocks.counts[:, Phase.FORWARD] * np.array(
            [not _is_fused(op) for op in blocks.ops]
        )
        cost = Cost(*(counts @ values for values in _arrays(_costs_of_ops(blocks.ops, times))))
        cost.parts_s[:, _GAPS] = counts.sum(axis=1) * self.framework.host.kernel_gap_s
        return cost

    def _times(self, ops: Sequence[Op], in_layers: Bool[np.ndarray, " ops"]) -> EventTimes:
        """Times of events, with the storage types of weights and cache."""
        requests = self.requests
        # Decoding is bound by reading weights and cache, so their stored width decides, not the
        # type of the arithmetic.
        cache = WEIGHT_BYTES[requests.kv_dtype or storage_dtype(requests.dtype)]
        stored = []
        for op, is_in_layer in zip(ops, in_layers.tolist(), strict=True):
            if isinstance(op, Attention):
                stored.append(cache)
            elif is_in_layer:
                stored.append(requests.weight_bytes)
            else:
                stored.append(dtype_bytes(op.dtype))
        return inference_times(ops, stored, self.cluster, self.kernels, self.collectives)

    def _sends(self, rows: int) -> Cost:
        """Cost of sending the hidden state of `rows` tokens to the next stage, one part from every
        rank of a stage."""
        layout = self.layout
        # Hidden states travel in 16 bits; each tensor rank sends its part to its counterpart in the
        # next stage.
        n_bytes = float(rows * self.model.hidden * 2 / layout.tp)
        op = Placement.of("pp", layout).collective("send_recv", n_bytes, "bf16", self.cluster)
        # Stages follow one another, so that a send is between two ranks, however many stages there
        # are.
        two = replace(op, num_ranks=2, ranks_per_node=min(2, op.ranks_per_node))
        return _costs_of_ops((two,), self._times((two,), np.zeros(1, bool)))

    # --- how steps follow one another
    # ---------------------------------------------------------------

    def decode(self, sequences: int, context: int) -> Cost:
        """Cost of decoding one token for each sequence of a replica with `context` tokens.

        Stages work on micro-batches, one a stage where there are sequences enough. A sequence's
        next token starts when its last has left the pipeline and the other micro-batches have
        passed the slowest stage.
        """
        # With fewer micro-batches than stages some stages idle; more would only make each smaller.
        micro = min(self.layout.pp, sequences)
        # The token itself is one of the context's: the cache has the others.
        step = self.step(1, context - 1, -(-sequences // micro))
        through = step.through
        bottleneck = step.slowest * micro
        return through if through.total_s >= bottleneck.total_s else bottleneck

    @property
    def prompts_together(self) -> int:
        """The most prompts that one step reads."""
        return max(1, PREFILL_TOKENS // self.requests.prompt_tokens)

    def prefill(self, prompts: int) -> Cost:
        """Cost of reading prompts, in pipelined steps of at most `PREFILL_TOKENS` tokens."""
        # A pipeline: the first step passes through all stages, each further one costs as much as
        # the slowest stage.
        together = min(prompts, self.prompts_together)
        step, parts = self._prompt_step(together)
        return step.through + step.slowest * (parts * prompts / together - 1.0)

    def prompts_of_others(self) -> Cost:
        """Cost of the other requests' prompts that are read while one request is served."""
        together = min(self.sequences, self.prompts_together)
        step, parts = self._prompt_step(together)
        return step.slowest * (parts * (self.sequences - 1) / together)

    def _prompt_step(self, together: int) -> tuple[Cost, int]:
        """A step that reads a part of the prompts, and the number of such steps."""
        tokens = self.requests.prompt_tokens
        # Long prompts are read in parts of equal size (chunked prefill), short ones several at
        # once.
        parts = -(-tokens // PREFILL_TOKENS)
        size = -(-tokens // parts)
        # attention's time is linear in the number of cached tokens, so the step in the middle is
        # the mean one
        return self.step(size, (tokens - size) // 2, together), parts


def _arrays(cost: Cost) -> tuple[np.ndarray, ...]:
    return cost.parts_s, cost.uncertain_s, cost.shaky_s


def _costs_of_ops(ops: Sequence[Op], times: EventTimes) -> Cost:
    """Cost of one occurrence of each op, by op in place of stages."""
    belongs_to = np.zeros((len(ops), len(PARTS)))
    for i, op in enumerate(ops):
        part = _PART_OF_FAMILY.get(op.family, _ELEMENT_WISE)
        if isinstance(op, Collective):
            part = _COMMUNICATION
        belongs_to[i, part] = 1.0

    # Half-widths relative to the time; the floor keeps empty events from dividing by zero.
    half_width = (times.hi_s - times.lo_s) / 2.0 / np.maximum(times.time_s, 1e-300)
    is_extrapolated = np.isin(times.provenance, ("extrapolated", "analytical"))
    is_between_nodes = np.array(
        [isinstance(op, Collective) and op.num_nodes > 1 for op in ops], bool
    )
    time_s = times.time_s[:, None]
    return Cost(
        parts_s=belongs_to * time_s,
        uncertain_s=belongs_to * half_width[:, None] * time_s,
        shaky_s=np.stack([is_extrapolated, is_between_nodes], axis=1) * time_s,
    )


def _is_fused(op: Op) -> bool:
    """Whether an op is part of another kernel: residual additions are part of the next norm's
    (vLLM's `fused_add_rms_norm`, TensorRT-LLM's `rmsnormQuantization`), and nothing is dropped."""
    return isinstance(op, MemoryBound) and (
        op.op in ("bias_dropout_add", "dropout") or (op.op == "add" and op.n_inputs == 2)
    )


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Memory per device of the pipeline stage with the least room for its cache."""

    weights_bytes: float
    workspace_bytes: float
    """Activations of the largest step, and the framework's context."""
    cache_bytes: float
    """Cache of the requests in flight, each at its full length."""
    available_bytes: float
    """Device memory that a server uses (`MEMORY_SHARE`)."""
    most_requests: int
    """Requests of full length whose cache fits in addition to the weights, over all replicas."""

    @property
    def needed_bytes(self) -> float:
        return self.weights_bytes + self.workspace_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def serving_memory(server: Server) -> ServingMemory:
    """Compute the memory of a server with its requests in flight."""
    requests, layout = server.requests, server.layout
    # Activations are largest while prompts are read.
    tokens = min(requests.prompt_tokens, PREFILL_TOKENS)
    prompts = min(server.sequences, server.prompts_together)
    shard = shard_events(server.setting(tokens, 0, prompts), layout.replace(micro_batch=prompts))
    counts = stage_blocks(shard.kinds, layout.pp, 1, layout.partition)[:, 0]

    # Only the layers' weights may be narrower than the type of the products.
    product_bytes = dtype_bytes(storage_dtype(requests.dtype))
    params = shard.dense_params(layout.pp > 1) + shard.expert_params
    weights = counts @ (params * np.where(shard.layers, requests.weight_bytes, product_bytes))

    # The workspace is that of a layer, because the head works on the last token of every prompt
    # alone.
    largest_workspace = float(shard.workspace_bytes[shard.layers].max())
    workspace = largest_workspace + server.framework.memory.context_bytes
    sequence_bytes = _cache_of_sequence(server, counts[:, shard.layers].sum(axis=1).astype(int))

    # The stage whose cache has room for the fewest requests decides for all, since every request
    # passes every stage.
    available = MEMORY_SHARE * server.cluster.device.memory_bytes
    cache_bytes = np.maximum(available - weights - workspace, 0.0)
    most_sequences = np.floor(cache_bytes / np.maximum(sequence_bytes, 1e-300))
    tightest = int(np.argmin(most_sequences))

    # Where some stage has no room at all, show the one with most weights, because it is the one
    # that does not fit.
    if not most_sequences[tightest]:
        tightest = int(np.argmax(weights))
    return ServingMemory(
        weights_bytes=float(weights[tightest]),
        workspace_bytes=workspace,
        cache_bytes=float(sequence_bytes[tightest]) * server.sequences,
        available_bytes=available,
        most_requests=int(min(most_sequences.min(), 10**7)) * layout.dp,
    )


def _cache_of_sequence(server: Server, layers: np.ndarray) -> np.ndarray:
    """Bytes of a request's cache at its end on a device of every stage, in whole pages."""
    requests = server.requests
    element = WEIGHT_BYTES[requests.kv_dtype or storage_dtype(requests.dtype)]
    # The last page of a sequence is taken as a whole.
    tokens = -(-requests.tokens // PAGE_TOKENS) * PAGE_TOKENS
    per_layer = np.array(layer_cache_bytes(server.model, server.layout.tp, tokens, element))
    # Layers may differ in their cache (windows, mixers), so each stage sums those of its own.
    ends = np.cumsum(layers)
    return np.array([per_layer[end - n : end].sum() for end, n in zip(ends, layers, strict=True)])
