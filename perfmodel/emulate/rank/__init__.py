"""The side of a real rank: its process group, its lane of delayed work, and the calls of a script that have effects."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate.rank._effects import device_module
    from perfmodel.emulate.rank._group import EmulatedGroup
    from perfmodel.emulate.rank._install import install

__getattr__, __dir__ = lazy_names(__name__)
