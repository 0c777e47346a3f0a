"""Importers of JAX functions, compiled sharded modules, ONNX graphs and PyTorch modules.

`trace`, `read_sharded` and `read_onnx` give tables of kernels and collectives with exact FLOPs and
bytes, which predict a time; `trace_program`, `onnx_program` and `torch_program` give programs of
the IR, which can be distributed and executed too; `read_program` reads any of them.
"""

from perfmodel.display import shorten_reprs
from perfmodel.ir.importers._hlo_graph import read_sharded
from perfmodel.ir.importers._jaxpr import trace
from perfmodel.ir.importers._onnx import read_onnx
from perfmodel.ir.importers._onnx_program import onnx_program
from perfmodel.ir.importers._program import trace_program
from perfmodel.ir.importers._rows import (
    CollectiveRow,
    KernelRow,
    Unmapped,
    axis_groups,
    parse_groups,
)
from perfmodel.ir.importers._source import (
    SourceSettings,
    input_value,
    loaded,
    of_the_file,
    read_program,
    sharded_axis,
)
from perfmodel.ir.importers._table import OpTable, StepEstimate
from perfmodel.ir.importers._torch_program import rank_program, torch_program

shorten_reprs(__name__)
