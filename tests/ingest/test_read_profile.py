"""Profiles that torch (two ranks over gloo) and JAX record here, and other people's traces where
they are."""

import os
from pathlib import Path

import pytest

from perfmodel.errors import UnknownNameError
from perfmodel.ingest import Profile, read_profile
from perfmodel.ingest.profiles import ActivityKind
from perfmodel.ops import Collective, Gemm

DATA = Path(os.environ.get("PERFMODEL_DATA", "absent")) / "traces"


def rank_with_profile(rank: int, port: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in range(3):
            with torch.profiler.record_function(f"step={step}"):
                torch.mm(x, w).sum().backward()
                dist.all_reduce(w.grad)
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    torch = pytest.importorskip("torch")
    from socket import socket

    folder = tmp_path_factory.mktemp("ranks")
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_with_profile, (port, str(folder)), 2)
    return read_profile("auto", sorted(folder.glob("*.json")))


def test_torch_ranks_tell_products_and_collectives_of_known_size(two_ranks: Profile) -> None:
    assert two_ranks.devices == 2
    assert not two_ranks.asynchronous
    assert two_ranks.step_numbers() == (0, 1, 2)
    assert (two_ranks.step_s() > 0).all()
    for device in range(2):
        own = [call for call in two_ranks.in_steps() if call.device == device]
        products = [call.op for call in own if isinstance(call.op, Gemm)]
        # forward and the weights' gradient
        assert sorted((p.m, p.n, p.k) for p in products) == sorted(3 * [(64, 16, 32), (32, 16, 64)])
        moved = [call.op for call in own if call.kind == ActivityKind.COMMUNICATION]
        assert moved == 3 * [
            Collective(
                collective="all_reduce", bytes=2048, num_ranks=2, ranks_per_node=2, dtype="fp32"
            )
        ]


def test_jax_tells_products(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    step = jax.jit(lambda x, w: jax.numpy.tanh(x @ w).sum())
    x, w = jax.numpy.ones((256, 128)), jax.numpy.ones((128, 512))
    step(x, w).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for number in range(2):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                step(x, w).block_until_ready()
    found = read_profile("auto", [tmp_path])
    (op,) = {call.op for call in found.calls if call.family == "gemm"}
    assert isinstance(op, Gemm)
    assert (op.m, op.n, op.k) == (256, 512, 128)


@pytest.mark.parametrize(
    ("name", "family", "kernels_ms", "collective", "steps"),
    [
        ("resnet_no_shapes", "conv", 60.0, "", 5),
        ("control_no_operators", "gemm", 12.5, "all_reduce", 6),
        ("rank_with_nccl", "conv", 18.7, "all_reduce", 3),
        ("mi250_train", "gemm", 0.037, "", 1),
        ("alexnet", "conv", 5.4, "", 1),
    ],
)
def test_public_traces_are_read_as_far_as_they_go(
    name: str, family: str, kernels_ms: float, collective: str, steps: int
) -> None:
    """Without shapes, without operators, of one rank of many, of AMD: kernels by family,
    collectives by their names."""
    path = DATA / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in PERFMODEL_DATA/traces")
    found = read_profile("auto", [path])
    calls = found.in_steps()
    assert len(found.step_numbers()) == steps
    assert found.devices == 1
    assert found.asynchronous
    seconds = sum(call.time_s for call in calls if call.family == family)
    assert 1e3 * seconds / steps == pytest.approx(kernels_ms, rel=0.05)
    unnamed = sum(c.time_s for c in calls if c.kind != ActivityKind.COPY and not c.family)
    assert unnamed < 0.02 * sum(call.time_s for call in calls)
    assert not collective or collective in {
        c.family for c in calls if c.kind == ActivityKind.COMMUNICATION
    }


def test_timelines_of_this_package_are_no_profiles(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    with pytest.raises(UnknownNameError, match="perfmodel"):
        read_profile("perfmodel", [path])
