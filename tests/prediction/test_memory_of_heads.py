"""What a head keeps is gone before the layers run backward; what a compiler plans has no holes."""

from dataclasses import replace

import pytest

from perfmodel import catalog
from perfmodel.prediction import explain, step_problem
from perfmodel.spec import Job, Layout
from perfmodel.workload import Shard, blocks

MODEL = replace(catalog.model("llama3-8b"), layers=4)


@pytest.mark.parametrize("vocab", [1024, 4 * 128256])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_logits_are_gone_when_layers_run_backward(vocab: int, recompute: str) -> None:
    model, job = replace(MODEL, vocab=vocab), Job(global_batch=1, seq_len=4096)
    problem = step_problem(model, catalog.cluster("dgx-h100"), job)
    memory = explain(problem, Layout(recompute=recompute)).memory  # pyright: ignore[reportArgumentType]
    embedding, layer, head = (block for block, _ in blocks(model, job, Shard()))
    kept = {name: getattr(of.activation_bytes, recompute) for name, of in (("layer", layer), ("head", head))}
    assert memory.activations == embedding.activation_bytes.none + 4 * kept["layer"] + kept["head"]
    again = layer.activation_bytes.none - kept["layer"]
    while_it_runs = max(head.workspace_bytes, layer.workspace_bytes + again - kept["head"])
    assert memory.buffers == pytest.approx(while_it_runs + problem.framework.memory.context_bytes)


def test_inference_keeps_nothing_that_could_go() -> None:
    job = Job(global_batch=1, seq_len=4096, mode="inference")
    memory = explain(step_problem(MODEL, catalog.cluster("dgx-h100"), job), Layout()).memory
    assert memory.activations == 0
    assert memory.buffers > 0


def test_ranks_of_maxtext_keep_parts_of_the_residual_stream() -> None:
    framework = catalog.framework("maxtext")
    job = Job(global_batch=8, seq_len=2048, stops_recompute=True)
    (layout, _) = framework.layout("tp=4,recompute=full,micro_batch=8", MODEL)
    assert layout.sequence_parallel
    problem = step_problem(MODEL, catalog.cluster("dgx-h100"), job, None, framework)
    found, whole = (explain(problem, one) for one in (layout, layout.replace(sequence_parallel=False)))
    tokens = 8 * 2048
    # inputs of the layers and of the last norm
    assert whole.memory.activations - found.memory.activations == (4 + 1 + 1) * 2 * tokens * 4096 * 3 / 4
    assert found.memory_counted_bytes["reserved"] == found.memory_counted_bytes["allocated"]
