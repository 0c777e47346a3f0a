"""Programs that somebody else wrote: JAX functions, compiled sharded modules and ONNX graphs.

`trace`, `read_sharded` and `read_onnx` give tables of kernels and collectives with exact FLOPs and bytes, which
predict a time; `trace_program` gives a program of the IR, which can be distributed and executed too.
"""

from perfmodel.display import shorten_reprs
from perfmodel.importers._estimate import StepEstimate as StepEstimate
from perfmodel.importers._onnx import read_onnx as read_onnx
from perfmodel.importers._onnx_program import onnx_program as onnx_program
from perfmodel.importers._program import trace_program as trace_program
from perfmodel.importers._rows import CollectiveRow as CollectiveRow
from perfmodel.importers._rows import KernelRow as KernelRow
from perfmodel.importers._rows import Unmapped as Unmapped
from perfmodel.importers._sharded import read_sharded as read_sharded
from perfmodel.importers._table import OpTable as OpTable
from perfmodel.importers._torch_program import torch_program as torch_program
from perfmodel.importers._trace import trace as trace

shorten_reprs(__name__)
