"""The physical curve: known limits, monotone in everything, the same and differentiable in JAX."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from thinned import one_in

from perfmodel.cost.learn.collectives import ALGORITHMS, LinkConstants, collective_time
from perfmodel.cost.learn.collectives.links import TierConstants

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
INSIDE = TierConstants(
    hop_s=1e-6,
    hop_full_s=4e-6,
    hop_line_s=2e-6,
    latency_shift_s=0.0,
    usual_latency_s=2e-6,
    bytes_per_s=240e9,
)
BETWEEN = TierConstants(
    hop_s=6e-6,
    hop_full_s=14e-6,
    hop_line_s=8e-6,
    latency_shift_s=0.0,
    usual_latency_s=5e-6,
    bytes_per_s=20e9,
)
SWITCHED = LinkConstants(
    inside=INSIDE,
    between=BETWEEN,
    launch_s=5e-6,
    hop_switch_s=5e-6,
    peer_s=3e-6,
    low_latency_share=0.4,
    line_share=0.0,
    peer_exponent=0.0,
    node_exponent=0.03,
    switch_share=0.0,
    network_share=0.0,
    neighbour_share=0.4,
    post_s=1.4e-6,
    eager_bytes=1e30,
    tree_share=1.0,
)


def changed_links(links: LinkConstants, **changes: Any) -> LinkConstants:
    """Links with some constants changed; `inside` and `between` change those of their tier."""
    for name, change in changes.items():
        value = replace(getattr(links, name), **change) if isinstance(change, dict) else change
        links = replace(links, **{name: value})
    return links


def scaled_links(links: LinkConstants, constant: str, factor: Any) -> LinkConstants:
    """Links with one constant multiplied, such as `launch_s` or `inside.hop_s`."""
    tier, _, name = constant.rpartition(".")
    if tier:
        value = getattr(getattr(links, tier), name)
        return changed_links(links, **{tier: {name: value * factor}})
    return changed_links(links, **{name: getattr(links, name) * factor})


def seconds(kind: str, size: float, ranks: float, per_node: float, **changed: Any) -> float:
    links = changed_links(SWITCHED, **changed)
    return float(collective_time(kind, size, ranks, per_node, links))


def test_large_messages_run_at_the_bandwidth_of_their_algorithm() -> None:
    size = 1e12
    assert seconds("all_reduce", size, 8, 8) == pytest.approx(1.75 * size / 240e9, rel=0.1)
    assert seconds("all_gather", size, 8, 8) == pytest.approx(7 / 8 * size / 240e9, rel=0.1)
    assert seconds("all_gather", size, 16, 8) == pytest.approx(15 / 16 / 8 * size / 20e9, rel=0.1)
    assert seconds("send_recv", size, 2, 1) == pytest.approx(size / 20e9, rel=0.1)
    # what stays in the node does not load its adapters
    assert seconds("all_to_all", size, 16, 8) == pytest.approx(0.5 * size / 20e9, rel=0.1)
    assert seconds("all_to_all", size, 64, 8, node_exponent=0.0) == pytest.approx(
        56 / 64 * size / 20e9, rel=0.1
    )


def test_reduction_in_switches_halves_the_bytes_at_most() -> None:
    ring, switched = (seconds("all_reduce", 1e12, 8, 8, switch_share=share) for share in (0.0, 1.0))
    assert ring / switched == pytest.approx(1.75, rel=0.1)
    ring, network = (
        seconds(
            "all_reduce", 1e12, 512, 8, network_share=share, switch_share=1.0, node_exponent=0.0
        )
        for share in (0.0, 1.0)
    )
    assert ring / network == pytest.approx(2, rel=0.1)


def test_small_messages_cost_hops() -> None:
    """Trees grow with the logarithm of the nodes, rings and exchanges with the ranks."""
    eight, many = (seconds("all_reduce", 8.0, 8 * n, 8) for n in (8, 64))
    assert many - eight < 3 * (2 * 6e-6) + 5e-6
    assert seconds("all_gather", 8.0, 1024, 4) > 5e-3 * 0.3
    assert seconds("all_to_all", 8.0, 1024, 4) > 0.9 * 1020 * 3e-6


def test_without_switches_that_add_no_message_takes_their_way() -> None:
    """Two hops between nodes per doubling, however small the message."""
    times = [seconds("all_reduce", 8.0, 8 * n, 8) for n in (2, 4, 8, 16, 32)]
    np.testing.assert_allclose(np.diff(times), 2 * 6e-6, rtol=0.1)


DIRECT = "direct"
SERVER = replace(SWITCHED, direct_s=3e-6, direct_peers=7.0)
"""A switched node on which inference servers read the memory of seven peers."""


def all_reduce_s(size: float, ranks: float, per_node: float, algorithm: str, **changed) -> float:
    links = changed_links(SERVER, **changed)
    return float(collective_time("all_reduce", size, ranks, per_node, links, algorithm))


@pytest.mark.parametrize("ranks", [2.0, 3.0, 4.0, 8.0])
def test_direct_reductions_wait_for_barriers_and_read_each_byte_once_or_twice(ranks: float) -> None:
    """Two barriers whatever the ranks. Larger buffers are read in two shots, or by the library."""
    flag_s = 1e-6
    assert all_reduce_s(8.0, ranks, ranks, DIRECT) == pytest.approx(3e-6 + 2 * flag_s, rel=0.05)
    one_shot_s = 2 * flag_s + (ranks - 1) * 1e5 / 240e9
    two_shots_s = 3 * flag_s + 2 * (ranks - 1) / ranks * 1e5 / 240e9
    least_s = 3e-6 + min(one_shot_s, two_shots_s)
    assert all_reduce_s(1e5, ranks, ranks, DIRECT) == pytest.approx(least_s, rel=0.05)
    for size in (8.0, 1e4, 1e6, 1e8, 1e10):
        direct_s, library_s = (all_reduce_s(size, ranks, ranks, name) for name in (DIRECT, ""))
        assert direct_s <= library_s * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "per_node", "reach"), [(16.0, 8.0, 7.0), (4.0, 4.0, 1.0)])
def test_what_cannot_be_read_directly_is_left_to_the_library(
    ranks: float, per_node: float, reach: float
) -> None:
    """Peers on other nodes, and more than one behind a host bridge."""
    for size in (8.0, 1e6, 1e9):
        direct_s, library_s = (
            all_reduce_s(size, ranks, per_node, name, direct_peers=reach) for name in (DIRECT, "")
        )
        assert direct_s == pytest.approx(library_s, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["", DIRECT])
def test_calls_from_the_host_take_its_time_or_that_of_the_collective(algorithm: str) -> None:
    for size in 2.0 ** np.arange(3, 32):
        replayed_s = all_reduce_s(size, 8.0, 8.0, algorithm)
        called_s = all_reduce_s(size, 8.0, 8.0, algorithm, host_s=30e-6)
        assert max(replayed_s, 30e-6) <= called_s <= 1.1 * max(replayed_s, 30e-6)


@pytest.mark.parametrize("peers", [1, 3, 7])
def test_a_mesh_reaches_its_rate_with_all_of_its_devices(peers: int) -> None:
    """Fewer ranks have the links of their pairs alone."""
    mesh = {"peer_exponent": 1.0, "mesh_peers": peers}
    size = 1e12
    for ranks in range(2, peers + 2):
        rate = (ranks - 1) / ranks * size / seconds("all_gather", size, ranks, ranks, **mesh)
        assert rate == pytest.approx(240e9 * (ranks - 1) / peers, rel=0.01)


def test_held_to_one_algorithm_is_never_faster_than_free() -> None:
    for size in (8.0, 1e6, 1e10):
        for nodes in (1, 2, 4, 64):
            c = replace(SWITCHED, switch_share=0.7, network_share=0.7)
            free, *held = (
                float(collective_time("all_reduce", size, 8.0 * nodes, 8.0, c, name))
                for name in ("", *ALGORITHMS)
            )
            assert min(held) * 1.0001 >= free
    # kinds without that choice are not held
    c = SWITCHED
    assert collective_time("all_gather", 1e9, 64.0, 8.0, c, "nvls") == collective_time(
        "all_gather", 1e9, 64.0, 8.0, c
    )


def test_a_tree_of_two_nodes_sends_half_of_a_larger_one() -> None:
    """NVLink SHARP and a tree between nodes: bus bandwidth of two nodes beyond that of their
    adapters."""
    c = changed_links(SWITCHED, switch_share=1.0, node_exponent=0.0, inside={"bytes_per_s": 1e15})
    two, four = (
        float(collective_time("all_reduce", 1e12, 8.0 * n, 8.0, c, "nvls_tree")) for n in (2, 4)
    )
    assert four / two == pytest.approx(2, rel=0.01)


def test_a_send_to_a_neighbour_keeps_its_channels_on_few_nodes() -> None:
    two, four, eight, many = (
        seconds("send_recv", 1e11, n, 1, node_exponent=0.0) for n in (2, 4, 8, 4096)
    )
    assert two == pytest.approx(four)
    assert four < eight < many
    assert many == pytest.approx(1e11 / (0.4 * 20e9), rel=0.01)


def test_latency_acts_as_latency() -> None:
    """Two microseconds more a hop cost what the hops are, not a share of the transfer (hops of the
    ring take 3 us)."""
    for size in (8.0, 50e6, 1e10):
        before, after = (
            seconds(
                "all_gather",
                size,
                64,
                8,
                between={"latency_shift_s": shift, "usual_latency_s": 3e-6},
            )
            for shift in (0.0, 2e-6)
        )
        assert after - before == pytest.approx(8 * 2e-6, rel=0.01)


def test_lines_serve_where_latency_and_bandwidth_count_alike() -> None:
    """LL128: nearly the full rate at a fraction of the latency; nothing for the smallest and the
    largest messages."""
    lines = {"line_share": 0.92}
    for size, least, most in ((8.0, 0.98, 1.0), (1e9, 0.0, 0.85), (1e14, 0.98, 1.0)):
        without = seconds("all_gather", size, 1024, 8)
        ratio = seconds("all_gather", size, 1024, 8, **lines) / without
        assert least <= ratio <= most, size
    hops_s = 896 * 2e-6 + 128 * 0.5 * 8e-6
    transfer_s = 1023 / 1024 / 8 * 1e9 / (20e9 * 64**-0.03) / 0.92
    assert seconds("all_gather", 1e9, 1024, 8, **lines) == pytest.approx(
        hops_s + transfer_s, rel=0.02
    )


def test_a_message_that_asks_first_takes_twice_its_latency() -> None:
    """Beyond what is sent at once (4 KiB on the wire, 2 KiB of data): 1 step of a tree over two
    nodes."""
    eager = {
        "eager_bytes": 4096.0,
        "launch_s": 0.0,
        "inside": {"hop_s": 0.0},
        "between": {"bytes_per_s": 1e15, "hop_full_s": 1e-3, "hop_line_s": 1e-3},
    }
    small, large = (seconds("all_reduce", size, 2, 1, **eager) for size in (64.0, 1e5))
    assert small == pytest.approx(2 * 6e-6, rel=0.05)
    assert large == pytest.approx(2 * 2 * 6e-6, rel=0.05)


def test_rings_of_nodes_with_several_ranks_cross_the_network_at_half_the_latency() -> None:
    """NCCL's ring pays the whole latency only with one rank per node (`src/graph/tuning.cc`)."""
    nothing = {"launch_s": 0.0, "inside": {"hop_s": 0.0}, "post_s": 0.0}
    alone, several = (seconds("all_gather", 8.0, 64 * r, r, **nothing) for r in (1, 8))
    assert several / alone == pytest.approx(0.5, rel=0.01)


def test_every_step_of_a_ring_over_nodes_posts_to_the_network() -> None:
    """So do the steps inside a node, of which there are 56 here; none within one node, nor in a
    tree (NCCL's `netOverhead`)."""
    posts, none = (seconds("all_gather", 8.0, 64, 8, post_s=post) for post in (2e-6, 0.0))
    assert posts - none == pytest.approx(56 * (2e-6 - 1e-6), rel=0.05)
    assert seconds("all_gather", 8.0, 8, 8, post_s=2e-6) == seconds(
        "all_gather", 8.0, 8, 8, post_s=0.0
    )


HOPS = ("hop_s", "hop_full_s", "hop_line_s", "bytes_per_s")
SCALED = (
    "launch_s",
    "hop_switch_s",
    "peer_s",
    "post_s",
    *(f"{tier}.{name}" for tier in ("inside", "between") for name in HOPS),
)
"""Constants of which every time is a monotone function."""


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.floats(1, 1e11),
    per_node=st.sampled_from([1, 2, 4, 8]),
    nodes=st.integers(1, 600),
    factor=st.floats(1, 30),
    switch=st.sampled_from([0.0, 0.7]),
    lines=st.sampled_from([0.0, 0.92]),
    eager=st.sampled_from([4096.0, 1e30]),
    what=st.sampled_from(["bytes", "nodes", *SCALED]),
)
def test_monotone(
    kind: str,
    size: float,
    per_node: int,
    nodes: int,
    factor: float,
    switch: float,
    lines: float,
    eager: float,
    what: str,
) -> None:
    ranks = max(per_node * nodes, 2)
    links = replace(SWITCHED, switch_share=switch, line_share=lines, eager_bytes=eager)
    before = collective_time(kind, size, ranks, per_node, links)
    if what == "bytes":
        after = collective_time(kind, size * factor, ranks, per_node, links)
    elif what == "nodes":
        more_ranks = per_node * (int(nodes * factor) + 1)
        after = collective_time(kind, size, more_ranks, per_node, links)
    else:
        scaled = scaled_links(links, what, factor)
        after = collective_time(kind, size, ranks, per_node, scaled)
    if what.endswith("bytes_per_s"):
        before, after = after, before
    assert after >= before * (1 - 1e-9)


def in_jax(constants: Any) -> Any:
    """A record of constants, or one of them, as JAX arrays of three."""
    if not isinstance(constants, LinkConstants | TierConstants):
        return jnp.full(3, constants)
    return replace(constants, **{name: in_jax(value) for name, value in vars(constants).items()})


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_jax_gives_the_same_with_gradients(kind: str) -> None:
    size, ranks, per_node = (
        np.array([1e3, 1e6, 1e9]),
        np.array([16.0, 64.0, 512.0]),
        np.array([8.0, 8.0, 4.0]),
    )
    plain = collective_time(kind, size, ranks, per_node, SWITCHED)
    with jax.enable_x64(True):
        arrays = in_jax(SWITCHED)
        traced = collective_time(
            kind, jnp.asarray(size), jnp.asarray(ranks), jnp.asarray(per_node), arrays
        )
        np.testing.assert_allclose(np.asarray(traced), plain, rtol=1e-12)

        def log_time(logs: jax.Array) -> jax.Array:
            c = SWITCHED
            constants = ("between.hop_s", "between.bytes_per_s", "inside.bytes_per_s")
            for constant, factor in zip(constants, jnp.exp(logs[1:]), strict=True):
                c = scaled_links(c, constant, factor)
            return jnp.log(collective_time(kind, 1e6 * jnp.exp(logs[0]), 64.0, 8.0, c))

        check_grads(log_time, (jnp.zeros(4),), order=1, modes=("fwd", "rev"), rtol=1e-4)


def test_one_rank_is_free() -> None:
    assert all(seconds(kind, 1e6, 1, 1) == 0 for kind in KINDS)
