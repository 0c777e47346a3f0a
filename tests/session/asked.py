"""Questions whose answers may depend on nothing but themselves, and the files that some of them
name.

Run as a script, it answers questions (pickled, on standard input) each in a fresh process of its
own.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import perfmodel as pm
from perfmodel.cost.learn import load_regressor, save_regressor, shipped_folder
from perfmodel.errors import PerfModelError
from perfmodel.files import UNSEALED, sealed
from perfmodel.ingest.tables import write_bytes, write_text
from perfmodel.planning.layouts import SearchSpace
from perfmodel.prediction import COMPILED, EAGER
from perfmodel.prediction.sites import Adjustment, save_adjustments
from perfmodel.spec import Cluster, Job

SPACE = SearchSpace(
    tp=(1, 2, 4),
    pp=(1, 2),
    cp=(1,),
    ep=(1,),
    vpp=(1, 2),
    micro_batch=(1, 2),
    zero=(0, 1),
    recompute=("none",),
)
LAYOUTS = (
    "tp=2,pp=2,dp=2",
    "tp=2,pp=2,dp=2,micro_batch=2",
    "tp=4,pp=1,dp=2,zero=3",
    "tp=1,pp=4,dp=2,schedule=zb-h1",
    "tp=1,pp=4,dp=4,vpp=2",
    "tp=8,pp=2,dp=2",
    "tp=2,pp=2,dp=2,tp_overlap=true",
    "tp=2,pp=2,dp=2,recompute=full",
)
SETTINGS = (
    "compute_rate=2x",
    "memory_bandwidth=2x",
    "inter_node_bandwidth=0.5x",
    "inter_node_latency=3x",
    "all_reduce_delay_s=0.001",
    "host_op_s=0",
    "memory_bytes=2e10",
)
SCHEDULES = (
    "stages 0 | 1\nF0 F1 F2 F3 B0 B1 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n",
    "stages 0 | 1\nF0 F1 F2 F3 B0 B1 B2 B3\nF0 F1 F2 F3 B0 B1 B2 B3\n",
    "stages 0 | 1\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n",
)
"""Two devices, four micro-batches."""
CLUSTER = """
levels = [
  {{ name = "NVLink3", size = 4, bandwidth_gb_per_s = {inside}, latency_us = 2 }},
  {{ name = "InfiniBand HDR", size = 64, bandwidth_gb_per_s = {between}, latency_us = 5 }},
]
[device]
name = "Own"
vendor = "NVIDIA"
architecture = "Ampere"
memory_gib = 80
memory_bandwidth_gb_per_s = {memory}
peak_tflops = {{ fp32 = 19.5, bf16 = {peak}, fp16 = {peak} }}
compute_units = 108
clock_mhz = 1410
l2_mib = 40
link_gb_per_s = 300
source = ""
"""


@dataclass(frozen=True, kw_only=True)
class PriceQuery:
    """One question, and what the files hold when it is put."""

    kind: str = "predict"
    """`predict`, `search`, `whatif` or `compare`."""
    layout: str = LAYOUTS[0]
    layers: int = 4
    batch: int = 16
    dtype: str = "bf16"
    compiled: bool = False
    device: tuple[tuple[str, float], ...] = ()
    """Factors of the device's figures; `peak` of all its rates."""
    levels: tuple[tuple[str, float], ...] = ()
    """Factors of the outermost network level's figures."""
    cluster_file: tuple[float, float, float, float] | None = None
    """Figures in the cluster file, if the question names it: peak, memory, inside and between
    nodes."""
    schedule_file: int | None = None
    """Which of `SCHEDULES` the schedule file holds, if the question names it."""
    weights: int | None = None
    """Which of the fits the calibration folder holds, if the question names it."""
    settings: tuple[str, ...] = ()

    def put(self, folder: Path, fits: list[dict[str, bytes]]) -> str:
        """Write the files that the question names, and answer."""
        if self.cluster_file:
            names = ("peak", "memory", "inside", "between")
            write_text(
                folder / "own.toml",
                CLUSTER.format(**dict(zip(names, self.cluster_file, strict=True))),
            )
        if self.schedule_file is not None:
            write_text(folder / "own.txt", SCHEDULES[self.schedule_file])
        if self.weights is not None:
            for name, content in fits[self.weights].items():
                write_bytes(folder / "fitted" / name, content)
        return self.answer(folder)

    def answer(self, folder: Path) -> str:
        """Every figure of the answer as text, which tells any two floats apart."""
        try:
            return json.dumps(self._answer(folder), sort_keys=True)
        except PerfModelError as error:
            return str(error)

    def _answer(self, folder: Path) -> dict[str, Any]:
        model = replace(pm.model("gpt3-1.3b"), layers=self.layers)
        cluster = pm.cluster(str(folder / "own.toml")) if self.cluster_file else self._cluster()
        calibration = folder / "fitted" if self.weights is not None else None
        job = Job(global_batch=self.batch, seq_len=1024, dtype=self.dtype)
        layout = self.layout
        if self.schedule_file is not None:
            layout = f"tp=2,pp=2,dp=1,schedule=file:{folder / 'own.txt'}"
            job = replace(job, global_batch=4)
        given: dict[str, Any] = {
            "job": job,
            "calibration": calibration,
            "global_batch": job.global_batch,
        }
        framework = COMPILED if self.compiled else EAGER
        match self.kind:
            case "search":
                result = pm.search(
                    model,
                    cluster,
                    devices=8,
                    space=SPACE,
                    top=3,
                    settings=self.settings,
                    framework=framework,
                    **given,
                )
                return result.to_dict() | {"seconds": 0}
            case "whatif":
                return pm.whatif(model, cluster, layout, self.settings, **given).to_dict()
            case "compare":
                given |= {"framework": framework}
                predictions = pm.compare_schedules(
                    model, cluster, layout, schedules=("1f1b", "gpipe", "zb-h1"), **given
                )
                return {step.schedule: step.to_dict() for step in predictions}
        return pm.predict(model, cluster, layout, framework=framework, **given).to_dict()

    def _cluster(self) -> Cluster:
        cluster = pm.cluster("dgx-a100")
        factors = dict(self.device)
        rate = factors.pop("peak", 1.0)
        peak = {name: value and value * rate for name, value in vars(cluster.device.peak).items()}
        figures = {name: getattr(cluster.device, name) for name in factors}
        # whole numbers stay whole
        changed = {name: type(old)(old * factors[name]) for name, old in figures.items()}
        device = replace(cluster.device, peak=replace(cluster.device.peak, **peak), **changed)
        *inner, outer = cluster.levels
        outer = replace(
            outer, **{name: getattr(outer, name) * factor for name, factor in self.levels}
        )
        return replace(cluster, device=device, levels=(*inner, outer))


def fits(folder: Path) -> list[dict[str, bytes]]:
    """Files of fits that differ: of one family alone, and of kernels, collectives and runs
    together."""
    contents = []
    shipped = load_regressor(shipped_folder() / "gemm_half.safetensors")
    for number in range(3):
        params = shipped.params._replace(log_compute=shipped.params.log_compute - 0.2 * number)
        save_regressor(replace(shipped, params=params), folder)
        content = {"gemm_half.safetensors": (folder / "gemm_half.safetensors").read_bytes()}
        if number:
            from safetensors.numpy import load, save

            old = (shipped_folder() / "collectives.safetensors").read_bytes()
            header = json.loads(old[8 : 8 + int.from_bytes(old[:8], "little")])["__metadata__"]
            arrays = load(old)
            arrays["curves/value"] = arrays["curves/value"] + np.float32(0.1 * number)
            content["collectives.safetensors"] = sealed(
                save(arrays, header | {"checksum": UNSEALED})
            )
            values = (("gemm", 0.05 * number), ("step_overhead_s", 0.01))
            runs = save_adjustments(
                folder, {"A100-SXM4-80GB": Adjustment(device="A100-SXM4-80GB", values=values)}
            )
            content["end_to_end.json"] = runs.read_bytes()
        contents.append(content)
    return contents


def in_fresh_processes(questions: list[Callable[[], str]]) -> list[str]:
    """Answer each question in a forked process of its own, which has answered nothing before.

    JAX is imported there, but its backends are not started.
    """
    answers = []
    for question in questions:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            with os.fdopen(send, "w") as file:
                file.write(question())
            os._exit(0)
        os.close(send)
        with os.fdopen(receive) as file:
            answers.append(file.read())
        os.waitpid(child, 0)
    return answers


if __name__ == "__main__":
    import perfmodel.planning.design  # so that no child has to import anything

    np.seterr(all="ignore")
    asked, where, files = pickle.load(sys.stdin.buffer)
    json.dump(in_fresh_processes([lambda a=a: a.put(where, files) for a in asked]), sys.stdout)
