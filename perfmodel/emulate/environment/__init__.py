"""The environment that real ranks believe in: orders by which calls are delayed, and who answers them."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate.environment._environment import Environment, EnvironmentClient
    from perfmodel.emulate.environment._orders import (
        DELAYED,
        KINDS,
        VARIABLE,
        Call,
        Conditions,
        EmulationError,
        Orders,
        check_delay,
        delayed_as,
    )

__getattr__, __dir__ = lazy_names(__name__)
