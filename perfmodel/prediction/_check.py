"""Is a layout possible at all? One clear error, before anything is computed."""

from perfmodel.errors import LayoutError
from perfmodel.prediction._stages import ENDS
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster, Job, Layout, Model, Transformer


def check_layout(model: Model, cluster: Cluster, job: Job, layout: Layout, devices: int | None = None) -> None:
    """Raise `LayoutError` (or `UnknownNameError`) naming the first thing that does not fit together."""
    scheduler = get_schedule(layout.schedule)
    if devices is not None and layout.devices != devices:
        raise LayoutError(
            f"layout {layout} uses tp*cp*pp*dp = {layout.tp}*{layout.cp}*{layout.pp}*{layout.dp} = "
            f"{layout.devices} devices, not {devices}; {_suggest_dp(layout, devices)}"
        )
    if layout.devices > cluster.max_devices:
        raise LayoutError(
            f"layout {layout} needs {layout.devices} devices; cluster {cluster.name} has {cluster.max_devices}"
        )
    chunks = scheduler.chunks_for(layout.vpp)
    stages = int(scheduler.stage_map(layout.pp, chunks).max()) + 1
    if isinstance(model, Transformer):
        _check_transformer(model, job, layout, stages)
    elif layout.cp > 1 or layout.ep > 1:
        raise LayoutError(f"model {model.name} has no sequence or experts to split; use cp=1 and ep=1")
    scheduler.require(layout.pp, job.num_microbatches(layout), chunks)


def _check_transformer(model: Transformer, job: Job, layout: Layout, stages: int) -> None:
    if model.heads % layout.tp:
        raise LayoutError(
            f"{model.name}: {model.heads} attention heads are not divisible by tp={layout.tp}; "
            f"use a tp among {_divisors(model.heads)}"
        )
    if layout.ep > 1:
        if model.experts is None:
            raise LayoutError(f"{model.name} has no experts; use ep=1")
        if model.experts.count % layout.ep:
            raise LayoutError(
                f"{model.name}: {model.experts.count} experts are not divisible by ep={layout.ep}; "
                f"use an ep among {_divisors(model.experts.count)}"
            )
    split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if job.seq_len % split:
        raise LayoutError(
            f"sequence length {job.seq_len} is not divisible by {split} (cp, and tp with sequence_parallel)"
        )
    layers = model.layers + model.decoder_layers
    if stages > layers + ENDS:
        raise LayoutError(f"{model.name} has {layers} layers; {stages} pipeline stages are too many")


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)


def _suggest_dp(layout: Layout, devices: int) -> str:
    rest = layout.tp * layout.cp * layout.pp
    if devices % rest == 0:
        return f"use dp={devices // rest}"
    return f"choose tp, pp and cp whose product divides {devices}"
