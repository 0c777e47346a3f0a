"""Refuses plans that a backend cannot measure on any machine."""

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure._plan import Plan
from perfmodel.measure.backends import (
    INTERCONNECT,
    NcclTests,
    check_jax_kernel,
    check_nccl_tests,
    check_torch_kernel,
)
from perfmodel.measure.ranks import check_collective, check_group


def check_plan(plan: Plan, backend: str, *, started: bool) -> None:
    """Refuse a plan that the backend cannot measure on any machine.

    Args:
        started: whether a launcher started processes, one per rank, which may be on several nodes.

    Raises:
        PerfModelError: for an op, element type or placement that the backend does not measure.
    """
    if not (plan.kernel_points or plan.beside_kernels or plan.collectives):
        raise PerfModelError(
            "calibrate: the plan has nothing to measure; add [[kernels]] or [[collectives]]"
        )
    if backend == "nccl-tests":
        nccl_tests_of(plan)
        return
    check_op = check_torch_kernel if backend == "torch" else check_jax_kernel
    for point in plan.kernel_points:
        check_op(point.kernel)
    _check_beside(plan, backend, started=started)
    if started and plan.emulated_network:
        raise CalibrationError(
            "[emulated_network]: this run was started on real nodes; remove the table"
        )

    # Without a launcher or an emulated network all ranks are processes of this machine.
    for op in plan.collectives:
        hosts = op.num_nodes if started or plan.emulated_network else 1
        check_collective(op, hosts)
        if not started:
            check_group(op.num_ranks * op.concurrent)
        if op.num_nodes > 1 and plan.interconnect == INTERCONNECT:
            raise CalibrationError(
                'collectives between nodes: name the network in the plan, as interconnect = "infiniband"'
            )


def _check_beside(plan: Plan, backend: str, *, started: bool) -> None:
    """Refuse kernels beside collectives that ranks of one machine cannot run."""
    if not plan.beside_kernels:
        return
    if backend != "torch":
        raise CalibrationError(
            "[[kernels]] beside: JAX runs one program at a time on a device; measure with --backend torch"
        )
    if started:
        raise CalibrationError(
            "[[kernels]] beside: kernels that run during collectives are measured on one machine only; "
            "leave it out of a launched run"
        )
    for op, collective in plan.beside_kernels:
        check_torch_kernel(op)
        check_collective(collective)
        if collective.concurrent > 1:
            raise CalibrationError("[[kernels]] beside: one group at a time; leave concurrent out")
        check_group(collective.num_ranks)


def nccl_tests_of(plan: Plan) -> NcclTests:
    """The plan's settings for nccl-tests; raises `PerfModelError` unless these can measure
    everything in the plan."""
    tests = plan.nccl_tests
    if plan.kernel_points or plan.beside_kernels or not plan.collectives or tests is None:
        raise CalibrationError(
            "backend nccl-tests measures only collectives; give a plan with [[collectives]] and "
            "[nccl_tests], without [[kernels]]"
        )

    # Making a command refuses a launcher that cannot be filled in.
    for op in plan.collectives:
        check_nccl_tests(op)
        tests.command(op, 1, 1, 2)
    return tests
