"""What a server holds: weights, the cache that the rest of the memory is for, and what a step needs besides."""

from dataclasses import dataclass

import numpy as np

from perfmodel.planning.serving._request import MEMORY_SHARE, PAGE_TOKENS, PREFILL_TOKENS, WEIGHT_BYTES
from perfmodel.planning.serving._steps import Server
from perfmodel.prediction import shard_events, stage_blocks
from perfmodel.units import dtype_bytes
from perfmodel.workload import layer_cache_bytes, storage_dtype


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on one device of the pipeline stage with the least room for its cache."""

    weights_bytes: float
    workspace_bytes: float
    """Activations of the largest step, and the framework's context."""
    cache_bytes: float
    """Of the requests in flight, each as long as it gets."""
    available_bytes: float
    """What a server takes of the device (`MEMORY_SHARE`)."""
    most_requests: int
    """Requests of full length whose cache fits beside the weights, over all replicas."""

    @property
    def needed_bytes(self) -> float:
        return self.weights_bytes + self.workspace_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def serving_memory(server: Server) -> ServingMemory:
    """Memory of a server with its requests in flight."""
    requests, layout = server.requests, server.layout
    size = min(requests.prompt_tokens, PREFILL_TOKENS)
    prompts = min(server.sequences, server.prompts_together)
    largest = shard_events(server.setting(size, 0, prompts), layout.replace(micro_batch=prompts))
    counts = stage_blocks(largest.kinds, layout.pp, 1, layout.partition)[:, 0]
    wide = dtype_bytes(storage_dtype(requests.dtype))
    held = largest.dense_params(layout.pp > 1) + largest.expert_params
    weights = counts @ (held * np.where(largest.layers, requests.weight_bytes, wide))
    # the head works on the last token of every prompt alone
    workspace = float(largest.workspace_bytes[largest.layers].max()) + server.framework.context_bytes
    a_sequence = _cache_of_sequence(server, counts[:, largest.layers].sum(axis=1).astype(int))
    available = MEMORY_SHARE * server.cluster.device.memory_bytes
    rooms = np.floor(np.maximum(available - weights - workspace, 0.0) / np.maximum(a_sequence, 1e-300))
    tightest = int(np.argmin(rooms))
    if not rooms[tightest]:
        tightest = int(np.argmax(weights))
    return ServingMemory(
        weights_bytes=float(weights[tightest]),
        workspace_bytes=workspace,
        cache_bytes=float(a_sequence[tightest]) * server.sequences,
        available_bytes=available,
        most_requests=int(min(rooms.min(), 10**7)) * layout.dp,
    )


def _cache_of_sequence(server: Server, layers: np.ndarray) -> np.ndarray:
    """Bytes on a device of every stage of a request at its end, in whole pages."""
    requests = server.requests
    element = WEIGHT_BYTES[requests.kv_dtype or storage_dtype(requests.dtype)]
    tokens = -(-requests.tokens // PAGE_TOKENS) * PAGE_TOKENS
    per_layer = np.array(layer_cache_bytes(server.model, server.layout.tp, tokens, element))
    ends = np.cumsum(layers)
    return np.array([per_layer[end - n : end].sum() for end, n in zip(ends, layers, strict=True)])
