"""The ops: one table of rules each for a family of related ones."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.program.ir._op import OpDefinition
from perfmodel.program.ir.ops._collectives import COLLECTIVES
from perfmodel.program.ir.ops._elementwise import ELEMENTWISE
from perfmodel.program.ir.ops._experts import EXPERTS
from perfmodel.program.ir.ops._images import IMAGES
from perfmodel.program.ir.ops._matmul import MATMUL
from perfmodel.program.ir.ops._optimizer import OPTIMIZER
from perfmodel.program.ir.ops._shape import SHAPE
from perfmodel.program.ir.ops._tokens import TOKENS
from perfmodel.program.ir.ops._transformer import TRANSFORMER

OPS: Final[Mapping[str, OpDefinition]] = MappingProxyType(
    {**ELEMENTWISE, **MATMUL, **SHAPE, **TRANSFORMER, **TOKENS, **EXPERTS, **IMAGES, **OPTIMIZER, **COLLECTIVES}
)
"""Every op by name."""
