"""Makes torch.distributed build emulated groups, without changing the script."""

import inspect
import os
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, Final

from perfmodel.emulate._clock import come_first, own_threads
from perfmodel.emulate.environment import EmulationError, Orders
from perfmodel.emulate.wire import TIMEOUT, check_first_ranks, on_the_wire

_NAME: Final = "perfmodel"


def install(c10d: ModuleType) -> None:
    """Prepare torch.distributed, once its module is read and before the script sees it.

    Args:
        c10d: `torch.distributed.distributed_c10d`.
    """
    _Installed(c10d, Orders.from_environment())


class _Installed:
    def __init__(self, c10d: Any, orders: Orders) -> None:
        # Every way to a process group leads through one helper of torch; wrapping it leaves scripts
        # as they are.
        self._c10d = c10d
        self._orders = orders
        self._rank: Any = None
        self._forming: tuple[int, ...] = ()
        """Members of the group that is being made."""
        self._make = self._prompt(c10d._new_process_group_helper)
        c10d._new_process_group_helper = self._new_group
        if orders.wire:
            c10d.ProcessGroupGloo = on_the_wire(c10d, orders, lambda: self._forming)
        if orders.address:
            c10d.Backend.register_backend(
                _NAME, self._create, extended_api=True, devices=["cpu", "cuda"]
            )
        if orders.address or orders.wire:
            # The script's rendezvous waits for all ranks of the world; only the real ones will
            # come.
            c10d.rendezvous = lambda *_, **__: _store(orders)
            for name in ("broadcast_object_list", "scatter_object_list", "recv_object_list"):
                setattr(c10d, name, self._checked(name, getattr(c10d, name)))

    def _new_group(
        self, size: int, place: int, ranks: Any, backend: Any, store: Any, *rest: Any, **named: Any
    ) -> Any:
        """Make a process group that is emulated under the requested backend's name."""
        import torch  # pyright: ignore[reportMissingImports]

        from perfmodel.emulate.rank._rank import Rank

        # Made with the first group, when torch is there and the script has joined its world.
        first = self._rank is None
        if first:
            self._rank = Rank(self._orders, torch)
            if self._orders.wire:
                check_first_ranks(torch.distributed, self._orders)
        self._forming = tuple(ranks) or tuple(range(size))
        if not (self._orders.address or self._orders.wire):
            return self._make(size, place, ranks, backend, store, *rest, **named)
        # The script asked for NCCL or gloo; that is what torch must say when it is asked which
        # backend a group has.
        requested = self._c10d.BackendConfig(self._c10d.Backend(str(backend)))
        used = self._c10d.Backend("gloo" if self._orders.wire else _NAME)
        group, store = self._make(size, place, ranks, used, store, *rest, **named)
        if first and self._orders.address:
            group.try_out()
        if store is not None:  # else this rank is not a member
            self._c10d._world.pg_map[group] = (self._c10d.Backend(str(backend)), store)
            self._c10d._world.pg_backend_config[group] = str(requested)
        return group, store

    def _prompt(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the creation of a group, to give its threads priority on the rank's core."""

        def made(*arguments: Any, **named: Any) -> Any:
            # gloo starts its threads itself, so new threads are found by comparing the lists before
            # and after.
            before = own_threads()
            group = make(*arguments, **named)
            if self._orders.pinned:
                come_first(own_threads() - before)
            return group

        return made

    def _create(self, options: Any, _: Any) -> Any:
        """Make the backend of a group, which torch requests by its registered name."""
        from perfmodel.emulate.rank._group import EmulatedGroup

        orders = self._orders
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        # Several real ranks exchange their data by a gloo group of their own.
        real = [rank for rank in members if rank in orders.exchanging]
        group = None
        if len(real) > 1:
            store = self._c10d.PrefixStore("real ranks", options.store)
            timeout = options.timeout or TIMEOUT
            group = self._c10d.ProcessGroupGloo(
                store, real.index(orders.rank), len(real), timeout=timeout
            )
        return EmulatedGroup(str(options.group_id), members, self._rank, group)

    def _checked(self, name: str, function: Any) -> Any:
        """Wrap a function that receives Python objects, to refuse those of emulated ranks."""

        parameters = inspect.signature(function)

        def checked(*arguments: Any, **named: Any) -> Any:
            # The source may be given by position, by name or not at all.
            bound = parameters.bind(*arguments, **named).arguments
            default = None if name == "recv_object_list" else 0
            source = bound.get("src", default)
            orders = self._orders
            if source is not None and source not in orders.exchanging:
                if source in orders.real_ranks:
                    why = "excluded from data exchange by --apart; leave that out"
                else:
                    why = f"emulated and has no objects; make it real with --real-ranks {source},{orders.rank}"
                error = EmulationError(
                    f"rank {orders.rank}: {name} from rank {source}, which is {why}"
                )
                if orders.address:
                    self._rank.fail(error)
                raise error
            return function(*arguments, **named)

        return checked


def _store(orders: Orders) -> Generator[tuple[Any, int, int], None, None]:
    """The store that real ranks share, whatever the script's address; the lowest hosts it."""

    from torch.distributed import TCPStore  # pyright: ignore

    # Waiting for workers would wait for ranks that do not exist.
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    keeper = orders.rank == min(orders.real_ranks)
    yield (
        TCPStore(address, port, None, keeper, TIMEOUT, wait_for_workers=False),
        orders.rank,
        orders.world_size,
    )
