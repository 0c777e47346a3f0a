"""Backends that run measured kernels and collectives: JAX, PyTorch, nccl-tests."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.measure.backends._backend import (
        INTERCONNECT,
        Backend,
        KernelBeside,
        Transport,
        beside_row,
        call_overhead_s,
        check_device,
        collective_row,
        kernel_row,
        open_backend,
        same_device,
        transport_of,
    )
    from perfmodel.measure.backends._jax_backend import JaxBackend, unrounded
    from perfmodel.measure.backends._nccl_tests import (
        ALIGNMENT,
        NcclTests,
        check_nccl_tests,
        geometric_runs,
        nccl_tests_rows,
    )
    from perfmodel.measure.backends._programs import (
        MEASURED_FAMILIES,
        Calls,
        check_jax_kernel,
        check_kernel,
        check_torch_kernel,
        cold_sampler,
        host_flush,
        jax_program,
        torch_program,
    )
    from perfmodel.measure.backends._torch_backend import TorchBackend, event_sampler

__getattr__, __dir__ = lazy_names(__name__)
