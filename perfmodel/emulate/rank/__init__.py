"""The code inside a real rank: process groups, delayed work, and effects of collectives."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate.rank._effects import device_module
    from perfmodel.emulate.rank._group import EmulatedGroup
    from perfmodel.emulate.rank._install import install

__getattr__, __dir__ = lazy_names(__name__)
