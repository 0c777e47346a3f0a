"""Servers of every kind of model, engine and request, kept in `known_servings.csv`.

Prices are constant rates of kernels, and of links their latency and bandwidth, so that new weights
move nothing; intervals are those of a site whose
spread is given. A change that is meant to move answers
is followed by

    PYTHONPATH=tests python tests/serving/known_servings.py
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from constant_rates import SITE, Links, Rates
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.cost import EventTimes
from perfmodel.errors import PerfModelError
from perfmodel.ops import Collective, KernelOp
from perfmodel.prediction.sites import DEGREES, NEUTRAL
from perfmodel.serving import Serving, serve, serve_sweep
from perfmodel.spec import Framework
from perfmodel.spec.framework_facts import HostCosts, MemoryCosts

TABLE = Path(__file__).with_suffix(".csv")
FRAMEWORK = Framework(
    host=HostCosts(step_overhead_s=3e-3, kernel_gap_s=2e-6), memory=MemoryCosts(context_bytes=2e9)
)


@dataclass(frozen=True)
class Base:
    """A server that others are variants of."""

    model: str
    layers: int
    cluster: str
    layout: str
    options: dict[str, Any]


COMMON = {"degrees": [0.1 + 0.01 * i for i in range(len(DEGREES))], "events": 0.7, "noise": 0.02}
UNCERTAIN_SITE = replace(SITE, population=replace(NEUTRAL, common={**NEUTRAL.common, **COMMON}))
BASES = (
    Base(
        "llama3-8b",
        8,
        "dgx-h100",
        "tp=2,pp=2,dp=2",
        {"prompt_tokens": 1000, "output_tokens": 100, "batch": 32},
    ),
    Base(
        "mixtral-8x7b",
        4,
        "dgx-a100",
        "tp=4,ep=4,etp=1",
        {"prompt_tokens": 9000, "output_tokens": 7, "batch": 6},
    ),
    Base(
        "deepseek-v2-lite",
        6,
        "dgx-h100",
        "dp=4,ep=4",
        {"prompt_tokens": 300, "output_tokens": 1000, "batch": 64},
    ),
    Base(
        "gemma-2-9b",
        6,
        "hgx-b200",
        "pp=3",
        {"prompt_tokens": 20000, "output_tokens": 50, "batch": 2},
    ),
    Base(
        "gpt3-1.3b", 4, "dgx-a100", "tp=16", {"prompt_tokens": 100, "output_tokens": 1, "batch": 1}
    ),
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"batching": "static"},
    {"batching": "static", "output_tokens": 33, "prompt_tokens": 2049},
    {"batch": 4},
    {"batch": 96},
    {"batch": None},
    {"ttft_limit_s": 0.3, "batch": None},
    {"batch": None, "tpot_limit_s": 0.012},
    {"weight_dtype": "int4"},
    {"weight_dtype": "fp4", "kv_dtype": "fp8"},
    {"weight_dtype": "fp8"},
    {"weight_dtype": "int8", "kv_dtype": "fp32"},
    {"kv_dtype": "int8"},
    {"dtype": "fp16"},
    {"dtype": "fp8"},
    {"step_overhead_s": 2e-3},
    {"framework": FRAMEWORK},
    {"prompt_tokens": 8193},
    {"prompt_tokens": 17, "output_tokens": 15},
    {"layout": "tp=1"},
    {"layout": "tp=8"},
    {"layout": "pp=2"},
)


def figures(serving: Serving) -> dict[str, float]:
    """Figures of a server."""
    memory = serving.memory
    figures = {
        "ttft": serving.ttft_s,
        "tpot": serving.tpot_s,
        "step": serving.decode_step_s,
        "tokens": serving.tokens_per_s,
        "user": serving.tokens_per_s_per_user,
        "device": serving.tokens_per_s_per_device,
        "batch": float(serving.requests.batch),
        "most": float(memory.most_requests),
        "weights": memory.weights_bytes,
        "workspace": memory.workspace_bytes,
        "cache": memory.cache_bytes,
        "needed": memory.needed_bytes,
        "available": memory.available_bytes,
        "fits": float(serving.fits),
    }
    for name in ("ttft_interval_s", "tpot_interval_s", "tokens_per_s_interval"):
        figures[f"{name}.lo"], figures[f"{name}.hi"] = getattr(serving, name)
    return figures | serving.breakdown_s


class ServerRates(Rates):
    """Constant rates, by whichever kernels an engine runs."""

    def times(
        self, machine: Any, ops: Sequence[KernelOp | Collective], software: str = ""
    ) -> EventTimes:
        return super().times(machine, ops)


@contextmanager
def at_constant_rates() -> Iterator[None]:
    """Serve at constant rates and at a site whose spread is given."""
    kernels, links = ServerRates(), Links()
    with (
        patch("perfmodel.serving._serving.KernelModel.of", lambda weights: kernels),
        patch("perfmodel.serving._serving.CollectiveModel.of", lambda weights: links),
        patch("perfmodel.serving._serving.Site", lambda: UNCERTAIN_SITE),
    ):
        yield


def cases() -> Iterator[StoredCase]:
    """Every base with its possible variants, then two sweeps."""
    with at_constant_rates():
        yield from _cases()


def _cases() -> Iterator[StoredCase]:
    for base in BASES:
        model: Any = replace(catalog.model(base.model), layers=base.layers)
        for variant in ({}, *VARIANTS):
            options: dict[str, Any] = {"layout": base.layout} | base.options | variant
            name = ", ".join(
                f"{key}={getattr(value, 'label', value)}" for key, value in variant.items()
            )
            try:
                serving = serve(model, base.cluster, **options)
            except PerfModelError:
                continue
            yield StoredCase(base.model, name or base.model, figures(serving))
    long = {"prompt_tokens": 50000, "output_tokens": 200, "devices": 4}
    yield from _sweep("llama3-8b", 8, "dgx-h100", {**long, "tpot_limit_s": 0.02})
    yield from _sweep("mixtral-8x7b", 4, "dgx-a100", {**long, "ttft_limit_s": 3.0})


def _sweep(name: str, layers: int, cluster: str, options: dict[str, Any]) -> Iterator[StoredCase]:
    """Numbers of servers that a sweep tries and refuses, and its front."""
    model: Any = replace(catalog.model(name), layers=layers)
    sweep = serve_sweep(model, cluster, **options)
    sizes = {"servers": float(len(sweep.servings)), "rejected": float(len(sweep.rejected))}
    yield StoredCase(f"sweep of {name}", f"sweep of {name}", sizes | figures(sweep.best))
    for serving in sweep.pareto:
        yield StoredCase(
            f"sweep of {name}", f"{serving.layout.label} {serving.requests.batch}", figures(serving)
        )


if __name__ == "__main__":
    write_cases(TABLE, cases())
