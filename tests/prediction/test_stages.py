"""Dealing blocks to stages; placing groups on nodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.prediction.blocks import sliced_job
from perfmodel.prediction.composition import stage_blocks
from perfmodel.prediction.placement import Placement
from perfmodel.schedule import even_split
from perfmodel.spec import Job, Layout
from perfmodel.workload import Shard, blocks, layer_count


@given(st.integers(1, 200), st.integers(1, 60))
def test_split_is_even_and_complete(items, parts):
    if items < parts - 2:
        with pytest.raises(LayoutError, match=str(items)):
            even_split(items, parts)
        return
    sizes = even_split(items, parts)
    assert sizes.sum() == items
    assert sizes.max() - sizes.min() <= 1


def test_a_remainder_spares_first_and_last_stage():
    # zero-bubble runs: L = k p - 2 layers, one less on both ends
    assert even_split(22, 8).tolist() == [2, 3, 3, 3, 3, 3, 3, 2]


def kinds(pairs):
    return [(block.is_layer, n) for block, n in pairs]


@pytest.mark.parametrize("name", ["head.1", "patch_embedding"])
def test_names_of_layers_decide_nothing(name):
    net = catalog.model("vgg-16")
    renamed = replace(net, stack=(replace(net.stack[0], name=name), *net.stack[1:]))
    job = Job(global_batch=8, seq_len=1)
    assert kinds(blocks(renamed, job, Shard())) == kinds(blocks(net, job, Shard()))


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5))
def test_every_block_is_dealt_once(stages, segments):
    model = catalog.model("gpt3-1.3b")
    pairs = blocks(model, Job(global_batch=1, seq_len=128), Shard())
    counts = stage_blocks(kinds(pairs), stages, segments)
    assert counts.sum(axis=(0, 1)).tolist() == [n for _, n in pairs]
    assert counts[0, 0, 0] == 1  # the embedding leads
    assert counts[-1, :, -1].sum() == 1  # the head ends
    assert layer_count(pairs) == model.layers
    assert np.ptp(counts[:, :, 1].sum(axis=1)) <= 1


def test_embedding_and_head_may_have_a_stage_of_their_own():
    # zero-bubble's interleaved runs: 22 layers on 24 stages
    pairs = blocks(replace(catalog.model("gpt3-1.3b"), layers=22), Job(global_batch=1, seq_len=128), Shard())
    counts = stage_blocks(kinds(pairs), 24, 1)[:, 0]
    assert counts[0].tolist() == [1, 0, 0]
    assert counts[-1].tolist() == [0, 0, 1]
    assert (counts[1:-1, 1] == 1).all()


def test_groups_know_their_nodes():
    cluster = catalog.cluster("dgx-a100")
    layout = Layout(tp=4, pp=4, dp=8)
    tp = Placement.of("tp", layout).collective("all_reduce", 1e6, "bf16", cluster)
    assert (tp.num_ranks, tp.ranks_per_node, tp.num_nodes, tp.level, tp.concurrent) == (4, 4, 1, 0, 1)
    dp = Placement.of("dp", layout).collective("all_reduce", 1e6, "bf16", cluster)
    assert (dp.num_ranks, dp.ranks_per_node, dp.num_nodes, dp.level, dp.concurrent) == (8, 2, 4, 1, 4)


def test_a_slice_of_a_sequence_sees_the_slices_before_it() -> None:
    job = Job(global_batch=4, seq_len=1024)
    assert [sliced_job(job, 4, index) for index in range(4)] == [
        replace(job, seq_len=256, cached_tokens=256 * index) for index in range(4)
    ]
    # a whole sequence may have tokens behind it, of which it keeps the cache
    decoding = replace(job, seq_len=1, cached_tokens=1000, mode="inference")
    assert sliced_job(decoding, 1) == decoding
    with pytest.raises(LayoutError, match="1024 is not divisible by 3 slices"):
        sliced_job(job, 3)
    varied = replace(job, mean_tokens=300.0)
    assert sliced_job(varied, 1) == varied
    with pytest.raises(LayoutError, match="equal length"):
        sliced_job(varied, 2)
