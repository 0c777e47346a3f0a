"""The ops: one table of rules each for a family of related ones."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir._op import OpDefinition
from perfmodel.ir.ops._collectives import COLLECTIVES
from perfmodel.ir.ops._elementwise import ELEMENTWISE
from perfmodel.ir.ops._experts import EXPERTS
from perfmodel.ir.ops._matmul import MATMUL
from perfmodel.ir.ops._optimizer import OPTIMIZER
from perfmodel.ir.ops._shape import SHAPE
from perfmodel.ir.ops._tokens import TOKENS
from perfmodel.ir.ops._transformer import TRANSFORMER

OPS: Final[Mapping[str, OpDefinition]] = MappingProxyType(
    {**ELEMENTWISE, **MATMUL, **SHAPE, **TRANSFORMER, **TOKENS, **EXPERTS, **OPTIMIZER, **COLLECTIVES}
)
"""Every op by name."""
