"""One table from ops of ONNX (`Add`) and ATen (`add.Tensor`) to those of the IR.

A `ForeignOp` names the operands of an op and has a rule, which takes a `Call` and returns the item
of its output, or a list of several. One rule often serves ONNX and ATen, whose operands have the
same names in our table. What ONNX keeps in an attribute is read by the name of the attribute first.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.display import shorten_reprs
from perfmodel.ir.importers.foreign_ops._call import ForeignOp
from perfmodel.ir.importers.foreign_ops._choices import CHOICES
from perfmodel.ir.importers.foreign_ops._communication import COMMUNICATION
from perfmodel.ir.importers.foreign_ops._elementwise import ELEMENTWISE
from perfmodel.ir.importers.foreign_ops._images import IMAGES
from perfmodel.ir.importers.foreign_ops._parts import PARTS
from perfmodel.ir.importers.foreign_ops._products import PRODUCTS
from perfmodel.ir.importers.foreign_ops._shapes import SHAPES
from perfmodel.ir.importers.foreign_ops._writes import WRITES

FOREIGN_OPS: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **ELEMENTWISE,
        **SHAPES,
        **PARTS,
        **WRITES,
        **PRODUCTS,
        **CHOICES,
        **IMAGES,
        **COMMUNICATION,
    }
)
"""Ops by name; ATen's default overload has only the op's name."""

shorten_reprs(__name__)
