"""The ops: one table of rules each for a family of related ones."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.program.ir._op import OpDefinition
from perfmodel.program.ir.ops._collectives import COLLECTIVES
from perfmodel.program.ir.ops._elementwise import ELEMENTWISE
from perfmodel.program.ir.ops._fused import FUSED
from perfmodel.program.ir.ops._images import IMAGES
from perfmodel.program.ir.ops._matmul import MATMUL
from perfmodel.program.ir.ops._shape import SHAPE
from perfmodel.program.ir.ops._tokens import TOKENS

OPS: Final[Mapping[str, OpDefinition]] = MappingProxyType(
    {**ELEMENTWISE, **MATMUL, **SHAPE, **FUSED, **TOKENS, **IMAGES, **COLLECTIVES}
)
"""Every op by name."""
