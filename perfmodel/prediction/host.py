"""Time of optimizer updates on the host, for states in host memory."""

from itertools import pairwise
from typing import Final

from perfmodel.prediction._problem import Setting
from perfmodel.spec import OPTIMIZERS, Device, Job
from perfmodel.workload import optimizer_op

_NODE_MEMORY_BY_LINK: Final = (
    (15.75e9, 2 * 6 * 2666e6 * 8),
    (31.5e9, 2 * 8 * 3200e6 * 8),
    (63e9, 2 * 8 * 4800e6 * 8),
    (126e9, 2 * 8 * 6400e6 * 8),
)
"""Rate of the link between host and device, which indicates the generation of the host's
processors, and memory bandwidth of two such processors: channels, transfers per second, bytes per
transfer. PCIe 3: Intel Xeon Skylake, six channels of DDR4-2666; 4: AMD EPYC Rome, eight of
DDR4-3200; 5: Intel Xeon Sapphire Rapids, eight of DDR5-4800; 6: Granite Rapids, of which DGX B300
has those with eight of DDR5-6400."""
_COHERENT_HOST_BANDWIDTH: Final = 512e9
"""Bandwidth of the memory of one Grace processor (NVIDIA Grace CPU data sheet), which has 450 GB/s
to its devices."""
_COHERENT_LINK: Final = 450e9
_REACHED_SHARE: Final = 0.46 / 1.3
"""Share of its memory bandwidth that a host reaches while it updates for several ranks.

0.46: DeepSpeed's CPU-Adam for one process on two Xeon 8168 (ZeRO-Offload, Ren et al., USENIX ATC
2021, table 4: ten billion parameters in 2.57 s, of 30 bytes each). Ranks that are not bound to the
cores beside their memory take 1.3 times as long (github.com/deepspeedai/DeepSpeed, pull request
7474)."""
_THREAD_BYTES_PER_S: Final = 12e9
"""Rate at which one core streams from and to memory: ten to fourteen GB/s of server processors,
limited by the cache misses that a core keeps in flight (McCalpin, Memory Bandwidth and System
Balance in HPC Systems, SC16)."""


def node_memory_bandwidth(device: Device, devices: int) -> float:
    """Host memory bandwidth of a node with a number of devices, in bytes per second."""
    link = device.host_bandwidth_bytes_per_s or _NODE_MEMORY_BY_LINK[0][0]
    newest_link, newest = _NODE_MEMORY_BY_LINK[-1]

    # A link faster than PCIe is coherent: there is a processor for every 450 GB/s of it.
    if link > newest_link:
        return devices * link / _COHERENT_LINK * _COHERENT_HOST_BANDWIDTH

    # Devices on PCIe share two processors of the link's generation.
    for (_, bandwidth), (next_link, _) in pairwise(_NODE_MEMORY_BY_LINK):
        if link < next_link:
            return bandwidth
    return newest


_EAGER_ADAM_BYTES: Final = 84 - 28
"""Additional bytes that Adam moves per parameter if every operator is a separate pass over fp32
tensors (torch/optim/adamw.py `_single_tensor_adamw`: decay, first moment, two for the second, root,
division, sum and update) than in one loop."""


def host_bytes_per_parameter(job: Job, *, eager: bool) -> float:
    """Bytes of host memory read and written per parameter by an update on the host.

    They are as many as on the device, and more where it runs operator by operator (`eager`).
    """
    n_bytes = optimizer_op(1, job).bytes_per_param
    is_eager_adam = eager and OPTIMIZERS[job.optimizer].kernel == "adam"
    return n_bytes + (_EAGER_ADAM_BYTES if is_eager_adam else 0)


def host_update_s(setting: Setting, ranks: int) -> float:
    """Seconds per parameter of an update on the host, with several ranks per node.

    The ranks share the memory bandwidth of the node, and each brings as many threads as its
    framework starts.
    """
    framework = setting.framework
    if framework.host.host_updates_per_s is not None:
        return ranks / framework.host.host_updates_per_s
    n_bytes = host_bytes_per_parameter(setting.job, eager=framework.host.eager_host_updates)
    bandwidth = _REACHED_SHARE * node_memory_bandwidth(setting.cluster.device, ranks)
    # Launchers limit the threads of processes that share a node; one alone takes all cores.
    if framework.host.host_threads and ranks > 1:
        bandwidth = min(bandwidth, ranks * framework.host.host_threads * _THREAD_BYTES_PER_S)
    return ranks * n_bytes / bandwidth
