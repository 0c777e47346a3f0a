"""Everything that needs a GPU and has only run with a stand-in, on one GPU in less than ten
minutes.

python validate/gpu.py [--out validate/gpu] [--stand-in]

Measures and writes, for the card that it finds, `OUT/CARD/`: a page, and the tables with their
cards. `--stand-in` runs the same code on the CPU with small sizes and writes nothing: it tells
whether the script works, and no figures.

1. `calibrate`: kernels of all families by CUDA events, warm and cold, fp8 by `torch._scaled_mm`
   where the card has it; each held against the shipped price of the device, where the catalog knows
   it.
2. `calibrate`, NCCL: one rank alone, its calls by CUDA graphs; between GPUs where there are two or
   more.
3. `emulate`: a script whose tensors are on the GPU.
4. `run --backend torch`: the kernels of a program's device, against the reference executor.
5. Clock and power under load: a large product for some seconds, by `nvidia-smi`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.emulate import Emulation, Prices, emulate, modelled
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import read_table, write_text
from perfmodel.ir.execution import execute_function, random_inputs
from perfmodel.ir.execution.torch_kernels import torch_dtype, torch_kernel
from perfmodel.ir.models import mlp, training_step
from perfmodel.measure import Plan, run_plan
from perfmodel.measure.ranks import (
    GlooSession,
    NcclSession,
    Place,
    RankGroup,
    RankProcess,
    free_port,
)
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, MemoryBound, OptimizerStep

SCRIPT: Final = Path(__file__).parent / "emulated_scripts" / "on_device.py"
LOAD_S: Final = 8.0
"""Of large products one after another: a card's power limit holds its clock down after some
seconds."""
CALLS: Final = 100
ANSWER_S: Final = 60.0


@dataclass(frozen=True)
class Card:
    """The GPU, or the CPU in its place, on which the script runs."""

    name: str
    """As its driver gives it; of a stand-in the CPU's."""
    device: str
    """Torch's device."""
    has_fp8: bool
    gpus: int

    @property
    def is_stand_in(self) -> bool:
        """Whether the CPU stands in for a card."""
        return self.device == "cpu"

    @property
    def catalog_name(self) -> str | None:
        """Name of the catalog's device that this card is; None if there is none or several."""
        from perfmodel.measure.backends import same_device

        # A driver's name may fit several entries of the catalog, such as two sizes of memory.
        known = [device for device in catalog.devices() if same_device(device, self.name)]
        return known[0] if len(known) == 1 else None


def find_card(stand_in: bool) -> Card:
    """The first GPU, or the CPU in its place.

    Raises:
        PerfModelError: there is no GPU.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if stand_in:
        return Card("CPU", "cpu", has_fp8=False, gpus=0)
    if not torch.cuda.is_available():
        raise PerfModelError("no GPU that torch can use; --stand-in tries the script on the CPU")
    # Ada and Hopper, compute capability 8.9, are the first with fp8 products.
    capability = torch.cuda.get_device_capability(0)
    return Card(
        torch.cuda.get_device_name(0), "cuda", capability >= (8, 9), torch.cuda.device_count()
    )


def kernels(card: Card) -> tuple[KernelOp, ...]:
    """A few kernels of every family, as in a transformer layer of hidden size 4,096 (64 on a
    stand-in)."""
    h, tokens = (64, 32) if card.is_stand_in else (4096, 4096)
    dtype = "fp32" if card.is_stand_in else "bf16"
    # Products of attention and of both halves of a feed-forward, and one of few rows.
    shapes = [(tokens, h, h), (tokens, 4 * h, h), (tokens, h, 4 * h), (16, h, h)]
    # fp8 exists on some cards alone.
    ops: list[KernelOp] = [Gemm(m=m, n=n, k=k, dtype=dtype) for m, n, k in shapes]
    if card.has_fp8:
        ops += [Gemm(m=m, n=n, k=k, dtype="fp8") for m, n, k in shapes]
    for pass_ in ("fwd", "bwd"):
        ops.append(
            Attention(
                batch=1,
                heads=h // 64,
                kv_heads=h // 64,
                seq_q=tokens,
                seq_kv=tokens,
                head_dim=64,
                causal=True,
                dtype=dtype,
                pass_=pass_,
            )
        )
    ops += [
        MemoryBound(op=name, rows=tokens, hidden=h, dtype=dtype)
        for name in ("layer_norm", "gelu", "softmax")
    ]
    ops.append(OptimizerStep(n_params=h * h, bytes_per_param=28.0))
    return tuple(ops)


def kernel_table(card: Card, folder: Path) -> pd.DataFrame:
    """Measured microseconds of kernels, and the shipped price of a device that the catalog
    knows."""
    ops = kernels(card)
    # Limits are short: the whole script is to end within ten minutes.
    plan = Plan(
        device=card.catalog_name or card.name,
        rule=StoppingRule(max_s=0.5),
        collective_rule=StoppingRule(),
        kernels=ops,
        cold_kernels=ops[:4],
        collectives=(),
        kernel_table="kernels.csv",
        collective_table="collectives.csv",
        attempts=1,
        patience_s=0.0,
        any_device=True,
    )
    run_plan(plan, folder, "torch")
    table = read_table(folder / "kernels.csv")
    # The plan's table has warm kernels first, then the cold ones.
    shown = pd.DataFrame(
        {
            "kernel": [str(op) for op in (*ops, *ops[:4])],
            "caches": ["warm"] * len(ops) + ["cold"] * 4,
            "measured, us": table["time_us"],
            "interval, +-": table["ci95_half_width"],
        }
    )
    if card.catalog_name is not None:
        # Prices are of warm caches, so that cold rows have none.
        priced = KernelModel.load().times(catalog.device(card.catalog_name), ops)
        shown["priced, us"] = [*(1e6 * priced.time_s), *[np.nan] * 4]
        shown["priced / measured"] = shown["priced, us"] / shown["measured, us"]
    return shown


def one_rank_table(card: Card) -> pd.DataFrame:
    """Seconds of a collective of one rank alone, which is the time to launch it, with CUDA graphs
    where it is NCCL's."""
    # In a process of its own, as ranks are.
    session = GlooSession if card.is_stand_in else NcclSession
    place = Place(0, 1, f"127.0.0.1:{free_port()}")
    process = RankProcess(place, session)

    def ask(*request: Any) -> Any:
        """Send a request to the rank; returns its answer."""
        process.send(request)
        return _answer(process)

    rows = []
    try:
        _answer(process)  # it has joined
        for nbytes in (1 << 10, 1 << 20, 1 << 24):
            op = Collective(
                collective="all_reduce", bytes=nbytes, num_ranks=1, ranks_per_node=1, dtype="fp32"
            )
            ask("load", op)
            ask("run", CALLS)  # captures
            spans = ask("run", CALLS)
            call_s = (spans[-1][1] - spans[0][0]) / CALLS
            rows.append(
                {
                    "collective": "all_reduce",
                    "bytes": nbytes,
                    "ranks": 1,
                    "measured, us": 1e6 * call_s,
                }
            )
        process.send(("stop",))
    finally:
        process.end(5.0)
    return pd.DataFrame(rows)


def _answer(process: RankProcess) -> Any:
    """The value that a rank's process sends next.

    Raises:
        PerfModelError: the rank failed.
    """
    status, value = process.recv()
    if status != "ok":
        raise PerfModelError(f"the rank failed: {value}")
    return value


def group_table(card: Card) -> pd.DataFrame:
    """Collectives between all GPUs; between two processes on a stand-in; empty with one GPU."""
    from perfmodel.measure.timing import NoMeter, machine_meter

    ranks = 2 if card.is_stand_in else card.gpus
    if ranks < 2:
        return pd.DataFrame()
    meter = machine_meter() if card.is_stand_in else NoMeter()
    rows = []
    with RankGroup(ranks, GlooSession if card.is_stand_in else NcclSession) as group:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for nbytes in (1 << 14, 1 << 24):
                op = Collective(
                    collective=kind,
                    bytes=nbytes,
                    num_ranks=ranks,
                    ranks_per_node=ranks,
                    dtype="fp32",
                )
                group.load(op)
                # The first calls set up connections and are not timed.
                group.sample(20, meter)
                sample = group.sample(20, meter)
                rows.append(
                    {
                        "collective": kind,
                        "bytes": nbytes,
                        "ranks": ranks,
                        "measured, us": 1e6 * sample.call_s,
                    }
                )
    return pd.DataFrame(rows)


def emulation_table(card: Card) -> pd.DataFrame:
    """A script on the card as rank 0 of eight: time of an iteration, with and without 5 ms added to
    each reduction."""
    cluster = catalog.cluster("dgx-a100")
    # The card is rank 0 of a node that is not there; the others' times are modelled.
    prices = Prices(cluster, modelled(cluster, CollectiveModel.load()))
    rows = []
    for delay_s in (0.0, 5e-3):
        emulation = Emulation(
            command=(sys.executable, str(SCRIPT), card.device),
            world_size=8,
            prices=prices,
            conditions={"delays_s": {"all_reduce": delay_s}},
            quiet=True,
        )
        report = emulate(emulation).to_dict()
        rows.append(
            {
                "delay of all_reduce, ms": 1e3 * delay_s,
                "collectives": report["collectives"],
                "iteration, ms": 1e3 * report["iteration_s"],
                "in collectives, ms": 1e3 * report["communication_s"],
            }
        )
    return pd.DataFrame(rows)


def program_table(card: Card) -> pd.DataFrame:
    """Largest error and time of a small network's training step, run by torch's kernels on the
    card."""
    import torch  # pyright: ignore[reportMissingImports]

    step = training_step(mlp(64, (256, 256, 256)))
    program = step.function
    inputs = step.split(random_inputs(step))
    expected = execute_function(program, inputs)
    types = program.types
    device = torch.device(card.device)

    def run() -> dict[str, Any]:
        """Outputs of the program by torch's kernels, on the host."""
        values = {}
        for name, array in inputs.items():
            values[name] = torch.tensor(array, dtype=torch_dtype(types[name]), device=device)
        for instruction in program.instructions:
            output_types = [types[name] for name in instruction.outputs]
            kernel = torch_kernel(instruction, output_types, device)
            operands = [values[name] for name in instruction.inputs]
            results = kernel(*operands)
            values.update(zip(instruction.outputs, results, strict=True))
        return {name: values[name].cpu().numpy() for name in program.outputs}

    # The first run loads and compiles kernels; the second is timed.
    computed = run()
    begin_s = time.perf_counter()
    run()
    errors = []
    for name, reference in expected.items():
        difference = np.abs(computed[name] - reference).max()
        # An output of zeros alone has no size that an error could be relative to.
        errors.append(float(difference / max(np.abs(reference).max(), 1e-30)))
    row = {
        "program": "training step of an MLP",
        "instructions": len(program.instructions),
        "largest relative error": max(errors),
        "time, ms": 1e3 * (time.perf_counter() - begin_s),
    }
    return pd.DataFrame([row])


def load_table(card: Card) -> pd.DataFrame:
    """Rate, clock and power of a large product in the first half-second and at the end of
    `LOAD_S`."""
    import torch  # pyright: ignore[reportMissingImports]

    n = 256 if card.is_stand_in else 8192
    dtype = torch.float32 if card.is_stand_in else torch.bfloat16
    # Random numbers: zeros take less power, and would keep the clock up.
    a = torch.randn(n, n, device=card.device).to(dtype)
    b = torch.randn(n, n, device=card.device).to(dtype)
    until_s = 0.5 if card.is_stand_in else LOAD_S
    rows = []
    begin_s = at_s = time.perf_counter()
    # Rates are taken over sixteenths: the first shows the clock before the power limit holds it
    # down.
    while at_s - begin_s < until_s:
        count = 0
        while time.perf_counter() - at_s < until_s / 16:
            for _ in range(10):
                torch.mm(a, b)
            # A GPU only queues the products; a CPU, which stands in for it, has computed them.
            if not card.is_stand_in:
                torch.cuda.synchronize()
            count += 10
        now_s = time.perf_counter()
        smi = {} if card.is_stand_in else clock_and_power()
        rows.append(
            {"after, s": now_s - begin_s, "TFLOP/s": 2e-12 * n**3 * count / (now_s - at_s)} | smi
        )
        at_s = time.perf_counter()
    return pd.DataFrame([rows[0], rows[-1]])


def clock_and_power() -> dict[str, float]:
    """SM clock and power of the first GPU now, by its driver."""
    query = [
        "nvidia-smi",
        "-i",
        "0",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    clock, power = done.stdout.strip().split(",")
    return {"SM clock, MHz": float(clock), "power, W": float(power)}


def sections(card: Card, folder: Path) -> Iterator[tuple[str, pd.DataFrame | str, float]]:
    """Title, table and seconds of each part; a part that fails says why, and the others go on."""
    parts: Sequence[tuple[str, Callable[[], pd.DataFrame]]] = (
        ("Kernels by CUDA events", lambda: kernel_table(card, folder)),
        ("NCCL, one rank by CUDA graphs", lambda: one_rank_table(card)),
        ("NCCL between GPUs", lambda: group_table(card)),
        ("Emulation of a script whose tensors are on the card", lambda: emulation_table(card)),
        ("A program by torch's kernels", lambda: program_table(card)),
        ("Rate, clock and power under load", lambda: load_table(card)),
    )
    for title, measure in parts:
        begin_s = time.perf_counter()
        try:
            result: pd.DataFrame | str = measure()
        except Exception as error:
            result = f"failed: {type(error).__name__}: {error}"
        yield title, result, time.perf_counter() - begin_s


def page(card: Card, folder: Path) -> tuple[str, bool]:
    """Format the page of a card; also returns whether all parts ran."""
    text = [f"<!-- written by `python validate/gpu.py` -->\n\n# {card.name}\n"]
    complete = True
    for title, result, seconds in sections(card, folder):
        print(f"{title}: {seconds:.0f} s", file=sys.stderr)
        complete &= not isinstance(result, str)
        if isinstance(result, str):
            shown = result
        elif len(result):
            shown = markdown_table(result)
        else:
            shown = "not on one GPU\n"
        text.append(f"## {title}\n\n{shown}")
    return "\n".join(text), complete


def main() -> int:
    """Measure everything on the card and write its page; 1 where a part failed."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "gpu")
    arguments.add_argument(
        "--stand-in", action="store_true", help="on the CPU, small, to try the script"
    )
    options = arguments.parse_args()
    card = find_card(options.stand_in)
    if card.is_stand_in:
        with tempfile.TemporaryDirectory() as folder:
            text, complete = page(replace(card, name="CPU, a stand-in: no figures"), Path(folder))
    else:
        folder = options.out / "".join(c if c.isalnum() else "_" for c in card.name)
        text, complete = page(card, folder)
        write_text(folder / "gpu.md", text)
    print(text)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
