"""One table from the ops of ONNX (`Add`) and ATen (`add.Tensor`) to those of the IR: an op is one entry.

A rule takes a `Call` and returns the item of its output, or a list of several. ONNX's inputs and ATen's arguments are
read by position, so that one rule often serves both; what ONNX keeps in an attribute is read by that name first.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.display import shorten_reprs
from perfmodel.ir.importers.foreign_ops._call import Call, Rule
from perfmodel.ir.importers.foreign_ops._choices import CHOICES
from perfmodel.ir.importers.foreign_ops._communication import COMMUNICATION
from perfmodel.ir.importers.foreign_ops._elementwise import ELEMENTWISE
from perfmodel.ir.importers.foreign_ops._images import IMAGES
from perfmodel.ir.importers.foreign_ops._products import PRODUCTS
from perfmodel.ir.importers.foreign_ops._shapes import SHAPES

FOREIGN_OPS: Final[Mapping[str, Rule]] = MappingProxyType(
    {**ELEMENTWISE, **SHAPES, **PRODUCTS, **CHOICES, **IMAGES, **COMMUNICATION}
)
"""Rule of each op; ATen's default overload is named by the op alone."""

shorten_reprs(__name__)
