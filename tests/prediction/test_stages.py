"""Dealing blocks to stages; placing groups on nodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.prediction import layout_batches, step_problem
from perfmodel.prediction.blocks import sliced_job
from perfmodel.prediction.placement import Placement
from perfmodel.program import by_layer, segment_sizes, stage_blocks
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


KINDS = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=6).filter(
    lambda kinds: any(is_layer for is_layer, _ in kinds)
)
"""Whether each block is a layer, and how often it occurs: layers with riders before, between and
behind them."""


@given(kinds=KINDS, stages=st.integers(1, 4), segments=st.integers(1, 3), data=st.data())
def test_blocks_join_the_layer_before_them_and_the_ends_of_the_model(kinds, stages, segments, data):
    """One by one: a layer to its segment, what precedes all layers to the first, what follows them
    to the last segment that has any, anything else to the layer before it."""
    order = [
        (number, is_layer)
        for number, (is_layer, repeats) in enumerate(kinds)
        for _ in range(repeats)
    ]
    layers = sum(is_layer for _, is_layer in order)
    cuts = sorted(
        data.draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1))
    )
    partition = tuple(int(n) for n in np.diff([0, *cuts, layers]))
    holds = [n > 0 for n in partition]
    holds[0] |= not order[0][1]
    holds[-1] |= not order[-1][1]
    if not all(holds):
        with pytest.raises(LayoutError, match="at least one layer each"):
            stage_blocks(kinds, stages, segments, partition)
        return
    slots = []
    for stage, n in enumerate(partition):
        for segment, size in enumerate(segment_sizes(n, segments).tolist()):
            slots += [(stage, segment)] * size
    filled = [segment for stage, segment in slots if stage == stages - 1]
    expected = np.zeros((stages, segments, len(kinds)))
    passed = 0
    for number, is_layer in order:
        passed += is_layer
        if passed == 0:
            place = (0, 0)
        elif passed == layers and not is_layer:
            place = (stages - 1, max(filled, default=0))
        else:
            place = slots[passed - 1]
        expected[*place, number] += 1
    np.testing.assert_array_equal(stage_blocks(kinds, stages, segments, partition), expected)


@given(kinds=KINDS)
def test_blocks_before_a_cut_are_those_of_its_layers_with_their_riders(kinds):
    class Named:
        def __init__(self, is_layer: bool) -> None:
            self.is_layer = is_layer

    pairs = [(Named(is_layer), repeats) for is_layer, repeats in kinds]
    found = by_layer(pairs)  # pyright: ignore[reportArgumentType]
    order = [
        (number, is_layer)
        for number, (is_layer, repeats) in enumerate(kinds)
        for _ in range(repeats)
    ]
    layers = [place for place, (_, is_layer) in enumerate(order) if is_layer]

    def counted(blocks):
        counts = np.zeros(len(kinds))
        for number, _ in blocks:
            counts[number] += 1
        return counts

    np.testing.assert_array_equal(found.before, counted(order[: layers[0]]))
    np.testing.assert_array_equal(found.after, counted(order[layers[-1] + 1 :]))
    # a cut lies before the next layer, behind the last one before what ends the model
    ends = [*layers, layers[-1] + 1]
    for cut, end in enumerate(ends):
        np.testing.assert_array_equal(found.cumulative[cut], counted(order[layers[0] : end]))


@given(layers=st.integers(0, 40), segments=st.integers(1, 8))
def test_segments_are_even_and_the_last_are_empty_where_there_are_too_few_layers(layers, segments):
    sizes = segment_sizes(layers, segments)
    assert sizes.sum() == layers
    assert np.count_nonzero(sizes) == min(layers, segments)
    assert (sizes[: min(layers, segments)] > 0).all()
    if layers:
        assert np.ptp(sizes[: min(layers, segments)]) <= 1


@pytest.mark.parametrize("text", ["pp=4", "pp=4,dp=2,zero=3", "pp=2,vpp=2", "dp=8,zero=3"])
@pytest.mark.parametrize("full_layers", [(0,), (1,), (2,), (5,), (99,)])
def test_the_first_layers_of_a_stage_are_recomputed_in_full(text, full_layers):
    """One after another through its segments; no embedding and no head."""
    model = replace(catalog.model("gpt3-1.3b"), layers=12)
    problem = step_problem(model, catalog.cluster("dgx-a100"), Job(global_batch=32, seq_len=1024))
    layout = Layout.parse(text).replace(recompute_full_layers=full_layers)
    (batch,) = layout_batches(problem, [layout])
    counts, full = batch.program.counts, batch.program.full
    expected = np.zeros_like(counts)
    for stage in range(len(counts)):
        left = full_layers[0]
        for segment in range(counts.shape[1]):
            layers_here = counts[stage, segment, 1]
            expected[stage, segment, 1] = min(left, layers_here)
            left -= expected[stage, segment, 1]
    np.testing.assert_array_equal(full, expected)


def test_embedding_and_head_may_have_a_stage_of_their_own():
    # zero-bubble's interleaved runs: 22 layers on 24 stages
    pairs = blocks(
        replace(catalog.model("gpt3-1.3b"), layers=22), Job(global_batch=1, seq_len=128), Shard()
    )
    counts = stage_blocks(kinds(pairs), 24, 1)[:, 0]
    assert counts[0].tolist() == [1, 0, 0]
    assert counts[-1].tolist() == [0, 0, 1]
    assert (counts[1:-1, 1] == 1).all()


def test_groups_know_their_nodes():
    cluster = catalog.cluster("dgx-a100")
    layout = Layout(tp=4, pp=4, dp=8)
    tp = Placement.of("tp", layout).collective("all_reduce", 1e6, "bf16", cluster)
    assert (tp.num_ranks, tp.ranks_per_node, tp.num_nodes, tp.level, tp.concurrent) == (
        4,
        4,
        1,
        0,
        1,
    )
    dp = Placement.of("dp", layout).collective("all_reduce", 1e6, "bf16", cluster)
    assert (dp.num_ranks, dp.ranks_per_node, dp.num_nodes, dp.level, dp.concurrent) == (
        8,
        2,
        4,
        1,
        4,
    )


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
