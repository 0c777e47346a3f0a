"""All ops, with a table of rules per family."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir.op_definition import OpDefinition
from perfmodel.ir.ops._collectives import COLLECTIVES
from perfmodel.ir.ops._elementwise import ELEMENTWISE
from perfmodel.ir.ops._fused import FUSED
from perfmodel.ir.ops._images import IMAGES
from perfmodel.ir.ops._matmul import MATMUL
from perfmodel.ir.ops._shape import SHAPE
from perfmodel.ir.ops._tokens import TOKENS

OPS: Final[Mapping[str, OpDefinition]] = MappingProxyType(
    {**ELEMENTWISE, **MATMUL, **SHAPE, **FUSED, **TOKENS, **IMAGES, **COLLECTIVES}
)
"""Every op by name."""
