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
    kept = {
        name: getattr(of.activation_bytes, recompute)
        for name, of in (("layer", layer), ("head", head))
    }
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
    found, whole = (
        explain(problem, one) for one in (layout, layout.replace(sequence_parallel=False))
    )
    tokens = 8 * 2048
    # inputs of the layers and of the last norm
    assert (
        whole.memory.activations - found.memory.activations
        == (4 + 1 + 1) * 2 * tokens * 4096 * 3 / 4
    )
    assert found.memory_counted_bytes["reserved"] == found.memory_counted_bytes["allocated"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_torch_holds_three_tensors_of_fp32_logits_at_once_and_between_ranks_four(
    tp: int, dtype: str
) -> None:
    """Log-probabilities, the gradient of the chosen ones, and what is made of it; a fused loss, or
    one that works in place, holds less."""

    def head_bytes_per_logit(*eager: str) -> float:
        job = Job(global_batch=1, seq_len=4096, dtype=dtype, eager_kernels=eager)  # pyright: ignore[reportArgumentType]
        # Vocabularies that need no padding.
        (*_, (head, _)) = blocks(replace(MODEL, vocab=2**17), job, Shard(tp=tp))
        (*_, (twice, _)) = blocks(replace(MODEL, vocab=2**18), job, Shard(tp=tp))
        more_bytes = twice.workspace_bytes + twice.activation_bytes.none
        more_bytes -= head.workspace_bytes + head.activation_bytes.none
        return more_bytes / (4096 * 2**17 // tp)

    # A loss that reads logits as they are keeps two tensors, and makes as many of their type on the
    # way back.
    element_bytes = 4 if dtype == "fp32" else 2
    assert head_bytes_per_logit("loss_gradient") == pytest.approx(
        4 + element_bytes * (3 if tp > 1 else 2)
    )
    in_torch = head_bytes_per_logit("cross_entropy", "loss_gradient")
    assert in_torch == pytest.approx(16 if tp > 1 else 12)
    assert head_bytes_per_logit() < head_bytes_per_logit("cross_entropy") <= in_torch


@pytest.mark.parametrize("eager", [(), ("cross_entropy", "loss_gradient")])
def test_gathered_logits_take_as_much_on_each_rank_as_on_one_alone(eager: tuple[str, ...]) -> None:
    """Ranks that gather logits hold all of them, so that the head's memory beyond its weights and
    hidden states is that of a single rank; gathering them is the only exchange of the loss."""
    job = Job(global_batch=1, seq_len=4096, eager_kernels=eager)  # pyright: ignore[reportArgumentType]
    model = replace(MODEL, vocab=2**17)

    def head(tp: int, gathered: bool):
        (*_, (block, _)) = blocks(model, replace(job, gathered_logits=gathered), Shard(tp=tp))
        return block

    alone = head(1, False)
    assert head(1, True) == alone
    for tp in (2, 8):
        gathered, parted = head(tp, True), head(tp, False)
        assert gathered.workspace_bytes == alone.workspace_bytes
        assert gathered.activation_bytes == alone.activation_bytes
        assert (
            gathered.workspace_bytes + gathered.activation_bytes.none
            > parted.workspace_bytes + (parted.activation_bytes.none)
        )
        (gather,) = gathered.forward_comm
        assert (gather.collective, gather.bytes, gather.group) == (
            "all_gather",
            2.0 * 4096 * 2**17,
            "tp",
        )


@pytest.mark.parametrize("seq_len", [2048, 2**18])
def test_learned_positions_that_are_split_are_a_part_of_the_table_on_each_rank(
    seq_len: int,
) -> None:
    """With sequence parallelism alone, and only the table of positions: its states then go by the
    ranks."""
    model = replace(catalog.model("gpt3-1.3b"), layers=2)

    def embedding_params(tp: int, sequence_parallel: bool, split: bool) -> int:
        job = Job(global_batch=1, seq_len=seq_len, split_positions=split)
        ((block, _), *_) = blocks(model, job, Shard(tp=tp, sequence_parallel=sequence_parallel))
        return block.params

    for tp, sequence_parallel in ((1, False), (4, False), (4, True)):
        whole = embedding_params(tp, sequence_parallel, False)
        is_split = sequence_parallel and tp > 1
        saved = seq_len * model.hidden * (tp - 1) // tp if is_split else 0
        assert whole - embedding_params(tp, sequence_parallel, True) == saved
