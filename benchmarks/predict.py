"""Warm `pm.predict` and batched evaluation, as multiples of the issue's limits and of the event
loop."""

from collections import Counter
from dataclasses import replace

from timing import best_cpu_s, best_s

from perfmodel import catalog
from perfmodel.planning.layouts import default_space, enumerate_layouts
from perfmodel.prediction import evaluate, explain, step_problem
from perfmodel.prediction.memory import peak_memory
from perfmodel.spec import Job, Layout, Problem


def run() -> dict[str, dict[str, object]]:
    """GPT-3 175B on 1,024 A100s: one layout, the same with its timeline, and thousands at once."""
    model = catalog.model("gpt3-175b")
    cluster = catalog.cluster("dgx-a100")
    job = Job(global_batch=1536, seq_len=2048)
    problem = step_problem(model, cluster, job)
    layout = Layout(tp=8, pp=16, dp=8, zero=1, recompute="selective", sequence_parallel=True)
    # The first prediction builds and compiles what all later ones share.
    explain(problem, layout, timeline=True)
    one_s = best_s(lambda: explain(problem, layout), 30)
    timeline_s = best_s(lambda: explain(problem, layout, timeline=True), 30)
    # the space in which a closed-form tool needs 1.6 ms per layout: 1F1B and interleaved, ZeRO 0
    # and 1
    question = Problem(model=model, cluster=cluster, job=job, devices=1024)
    space = replace(default_space(question), schedule=("1f1b",), zero=(0, 1))
    candidates = list(enumerate_layouts(space, question, Counter()))
    peak, _ = peak_memory(problem, candidates)
    feasible = [
        layout
        for layout, peak_bytes in zip(candidates, peak, strict=True)
        if peak_bytes <= cluster.device.memory_bytes
    ]
    evaluate(problem, feasible)
    batch_s = best_s(lambda: evaluate(problem, feasible), 5) / len(feasible)
    batch_cpu_s = best_cpu_s(lambda: evaluate(problem, feasible), 5) / len(feasible)
    return {
        "predict/warm": {
            "ratio": one_s / 1.5e-3,
            "baseline": "1.5 ms",
            "unit": "x",
            "target": "<= 1",
            "seconds": one_s,
        },
        "predict/warm_with_timeline": {
            "ratio": timeline_s / 20e-3,
            "baseline": "20 ms",
            "unit": "x",
            "target": "<= 1",
            "seconds": timeline_s,
        },
        "predict/batched_per_layout": {
            "ratio": batch_s / 20e-6,
            "baseline": "20 us",
            "unit": "x",
            "target": "<= 1",
            "seconds": batch_s,
            "cpu_seconds": batch_cpu_s,
            "layouts": len(feasible),
        },
    }
