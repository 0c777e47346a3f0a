"""`perfmodel serve`: predicts a model server, or a sweep of layouts and batches."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._files import add_job_file, flags_of, require
from perfmodel.cli._flags import add_calibration, add_json, sequence_length
from perfmodel.cli._show import emit
from perfmodel.display import new_console, say_verbatim, table
from perfmodel.errors import PerfModelError
from perfmodel.spec import Framework
from perfmodel.spec.framework_facts import HostCosts
from perfmodel.units import GIB, dtype_name, duration, number_of, parse_seconds, span

if TYPE_CHECKING:
    from perfmodel.serving import Serving, ServingSweep


_PARTS: Final = {
    "products": "matrix products",
    "element_wise": "element-wise",
    "gaps": "kernel launch gaps",
}
"""Parts of a decode step that have another name in tables."""


def add_command(commands: Any) -> None:
    """Register the command `serve` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="predict how fast a language model answers: time to first token, time per token, throughput, cache",
        epilog="example: perfmodel serve --model llama3-70b --cluster dgx-h100 --layout tp=8 --prompt-tokens 1024 "
        "--output-tokens 256 --dtype fp8 --tpot-limit 25ms",
    )
    add_job_file(command, layout=True)
    command.add_argument("--model", help="catalog name, Hugging Face id or config.json, or TOML")
    command.add_argument("--cluster", help="catalog name or TOML")
    command.add_argument(
        "--layout",
        help='layout of tp, pp, dp, ep and etp, e.g. "tp=8" or "tp=8,ep=8,etp=1" (default: the smallest that fits)',
    )
    command.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices for the layouts of --sweep",
    )
    _add_requests(command)
    _add_dtypes(command)
    _add_limits(command)
    command.add_argument(
        "--step-overhead",
        type=_time,
        default=0.0,
        metavar="TIME",
        help="time between steps in which devices wait for scheduling and sampling (default 0)",
    )
    command.add_argument(
        "--sweep",
        action="store_true",
        help="try all layouts and batches, and show the trade-off between tokens/s per user and tokens/s per device",
    )
    command.add_argument(
        "--checkpoint",
        default="",
        metavar="PATH",
        help="name or folder of the checkpoint, for the commands that start an engine (default: MODEL)",
    )
    require(command, "model", "cluster", "prompt_tokens", "output_tokens")
    add_calibration(command)
    add_json(command)
    command.set_defaults(run=_serve)


def _add_requests(command: argparse.ArgumentParser) -> None:
    """Add the flags of the requests: lengths of prompts and answers, and how many are in flight."""
    command.add_argument(
        "--prompt-tokens", type=sequence_length, metavar="N", help="length of each prompt"
    )
    command.add_argument(
        "--output-tokens", type=sequence_length, metavar="N", help="length of each answer"
    )
    command.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help="requests in flight over all replicas (default: as many as fit and meet the latency limits, which "
        "default to 1 s for the first token and 50 ms for each later one)",
    )
    command.add_argument(
        "--batching",
        default="continuous",
        choices=("continuous", "static"),
        help="continuous: a new request starts when another ends; static: all start and end together",
    )


def _add_dtypes(command: argparse.ArgumentParser) -> None:
    """Add the element types of matrix products, and of (narrower) weights and cache."""
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("bf16", "fp16", "fp32", "fp8", "fp4", "int8"),
        help="element type of matrix multiplications",
    )
    command.add_argument(
        "--weight-dtype",
        type=dtype_name,
        default="",
        metavar="TYPE",
        help="narrower element type for the weights in memory: fp8, int8, int4 or fp4 (default: --dtype)",
    )
    command.add_argument(
        "--kv-dtype",
        type=dtype_name,
        default="",
        metavar="TYPE",
        help="element type of the key-value cache, e.g. fp8 (default: 16 bits)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    """Add the limits on latency, which decide the requests in flight unless `--batch` does."""
    for flag, description in (("ttft", "time to first token"), ("tpot", "time per output token")):
        command.add_argument(
            f"--{flag}-limit",
            type=_time,
            metavar="TIME",
            help=f"longest {description}, in seconds, or as 50ms",
        )


def _serve(arguments: argparse.Namespace) -> int:
    """Predict one server, or a sweep over servers, and show it."""
    from perfmodel import serving

    settings = {
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "batch": arguments.batch,
        "batching": arguments.batching,
        "dtype": arguments.dtype,
        "weight_dtype": arguments.weight_dtype,
        "kv_dtype": arguments.kv_dtype,
        "calibration": arguments.calibration,
        "ttft_limit_s": arguments.ttft_limit,
        "tpot_limit_s": arguments.tpot_limit,
        "framework": Framework(host=HostCosts(step_overhead_s=arguments.step_overhead)),
    }
    if arguments.sweep:
        if arguments.devices is None and arguments.layout is None:
            raise PerfModelError(
                "serve: --sweep needs --devices N, or --layout to try only the batches of one layout"
            )
        # A number of devices on the command line asks for all layouts, not for the job file's.
        asks_for_all = "devices" in arguments.given and "layout" not in arguments.given
        layouts = None if asks_for_all or not arguments.layout else [arguments.layout]
        swept = serving.serve_sweep(
            arguments.model,
            arguments.cluster,
            devices=arguments.devices,
            layouts=layouts,
            **settings,
        )
        best = {"layout": swept.best.layout.label, "batch": swept.best.requests.batch}
        command = _command(arguments, {"devices": None} | best)
        emit(arguments, swept.to_dict(), lambda: _show_sweep(swept, command))
        return 0

    # A job file's devices are not a mistake for a single server, which takes those of its layout.
    if arguments.devices is not None and "devices" in arguments.given:
        raise PerfModelError(
            "serve: --devices needs --sweep; without it --layout determines the number of devices"
        )
    start = serving.starting_point(
        arguments.model, arguments.cluster, arguments.layout or "", **settings
    )
    commands = serving.engine_commands(start.serving, arguments.checkpoint or "MODEL")
    report = start.serving.to_dict() | {"chosen": list(start.chosen), "engines": commands}
    others = {"layout": None, "batch": None, "devices": start.serving.devices}
    command = f"{_command(arguments, others)} --sweep"
    emit(arguments, report, lambda: _show(start.serving, start.chosen, commands, command))
    return 0


_FLAGS: Final = (
    "model",
    "cluster",
    "layout",
    "devices",
    "prompt_tokens",
    "output_tokens",
    "batch",
    "batching",
    "dtype",
    "weight_dtype",
    "kv_dtype",
    "ttft_limit",
    "tpot_limit",
    "step_overhead",
    "checkpoint",
    "calibration",
)
"""Flags that pass a server to another command."""


def _command(arguments: argparse.Namespace, changes: Mapping[str, Any]) -> str:
    """The command line of this server with some flags changed; None leaves a flag out."""
    words = [] if arguments.job_file is None else [str(arguments.job_file)]
    for change in arguments.job_changes:
        words += ["--set", change]
    stated = {name: getattr(arguments, name) for name in _FLAGS if name in arguments.given}
    for name, value in (stated | dict(changes)).items():
        if value is not None:
            words += [flags_of([name]), str(value)]
    return f"perfmodel serve {shlex.join(words)}"


def _time(text: str) -> float:
    try:
        return parse_seconds(text)
    except PerfModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _show(
    server: "Serving", chosen: Sequence[str], commands: Mapping[str, str], next_command: str
) -> None:
    """Print the server, the settings chosen for it, and the commands that start it."""
    from perfmodel.serving import folded

    console = new_console()
    requests = server.requests
    memory = server.memory
    types = (
        f"{requests.weight_dtype or requests.dtype} weights, {requests.kv_dtype or '16-bit'} cache"
    )
    console.print(
        f"{server.model} on {number_of(server.devices, 'device')} of {server.cluster}, layout {server.layout.label}\n"
        f"{requests.batch:,} requests in flight ({requests.batching} batching), {requests.prompt_tokens:,} tokens in, "
        f"{requests.output_tokens:,} out\n{types}"
    )
    rows = [
        (name, duration(value), span(duration(low), duration(high)))
        for name, value, (low, high) in (
            ("time to first token", server.ttft_s, server.ttft_interval_s),
            ("time per output token", server.tpot_s, server.tpot_interval_s),
        )
    ]
    # Without this the time per token and the decode step further below seem to contradict each
    # other.
    step_s = server.decode_step_s
    prompts_s = server.tpot_s - step_s
    if prompts_s > 5e-4 * server.tpot_s:
        rows.append(("  a decode step", duration(step_s), ""))
        rows.append(("  prompts of other requests in between", duration(prompts_s), ""))
    low, high = server.tokens_per_s_interval
    rows.append(
        (
            "output tokens per second",
            f"{server.tokens_per_s:,.0f}",
            span(f"{low:,.0f}", f"{high:,.0f}"),
        )
    )
    rows.append(("  per device", f"{server.tokens_per_s_per_device:,.0f}", ""))
    rows.append(("  per user", f"{server.tokens_per_s_per_user:,.1f}", ""))
    console.print(table("", ("", "predicted", "90 %"), rows))

    # Parts below 0.05 % of the step are left out.
    parts = [
        (_PARTS.get(name, name.replace("_", " ")), duration(s), f"{s / step_s:.1%}")
        for name, s in server.breakdown_s.items()
        if s > 5e-4 * step_s
    ]
    console.print(
        table(f"where a decode step of {duration(step_s)} goes", ("part", "time", "share"), parts)
    )
    fits = "fits" if server.fits else "does not fit"
    console.print(
        f"memory: needs {memory.needed_bytes / GIB:.1f} of the {memory.available_bytes / GIB:.1f} GiB that the "
        f"engine may use per device: {fits}\n"
        f"  weights {memory.weights_bytes / GIB:.1f}, cache {memory.cache_bytes / GIB:.1f}, workspace "
        f"{memory.workspace_bytes / GIB:.1f}\nthe cache has room for {memory.most_requests:,} such requests"
    )
    for sentence in chosen:
        console.print(sentence)
    replicas = f" (one of {server.layout.dp} replicas)" if server.layout.dp > 1 else ""
    for engine, command in commands.items():
        console.print(f"{engine}{replicas if engine == 'tensorrt-llm' else ''}:")
        console.print(f"  {folded(command)}", soft_wrap=True, markup=False)
    say_verbatim(f"next: {next_command}")


def _show_sweep(swept: "ServingSweep", next_command: str) -> None:
    """Print the servers that no other beats in both throughput per user and per device."""
    from perfmodel.planning.layouts import layout_last

    console = new_console()
    best = swept.best
    requests = best.requests
    console.print(
        f"{best.model} on {best.cluster}, {requests.prompt_tokens:,} tokens in, {requests.output_tokens:,} out: "
        "Pareto front of\ntokens/s per user and tokens/s per device"
    )
    heads = ("tok/s/user", "tok/s/device", "batch", "TTFT", "per token")
    rows = []
    for server in swept.pareto:
        per_user = f"{server.tokens_per_s_per_user:.1f}"
        per_device = f"{server.tokens_per_s_per_device:,.0f}"
        batch = f"{server.requests.batch:,}"
        rows.append(
            (
                per_user,
                per_device,
                batch,
                duration(server.ttft_s),
                duration(server.tpot_s),
                server.layout.label,
            )
        )
    layout_last(console, heads, rows)
    console.print(
        f"{len(swept.servings):,} combinations of layout and batch fit and meet the limits; "
        f"{number_of(len(swept.rejected), 'layout')} cannot serve the model"
    )
    say_verbatim(f"next: {next_command}")
