"""The emulated environment of real ranks: their orders, and the server that answers their calls."""

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
