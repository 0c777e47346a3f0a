"""Programs that somebody else wrote: JAX functions, compiled sharded modules, ONNX graphs and PyTorch modules.

`trace`, `read_sharded` and `read_onnx` give tables of kernels and collectives with exact FLOPs and bytes, which
predict a time; `trace_program`, `onnx_program` and `torch_program` give programs of the IR, which can be distributed
and executed too; `read_program` reads any of them.
"""

from perfmodel.display import shorten_reprs
from perfmodel.importers._onnx import read_onnx as read_onnx
from perfmodel.importers._onnx_program import onnx_program as onnx_program
from perfmodel.importers._program import trace_program as trace_program
from perfmodel.importers._rows import CollectiveRow as CollectiveRow
from perfmodel.importers._rows import KernelRow as KernelRow
from perfmodel.importers._rows import Unmapped as Unmapped
from perfmodel.importers._source import SourceSettings as SourceSettings
from perfmodel.importers._source import input_value as input_value
from perfmodel.importers._source import loaded as loaded
from perfmodel.importers._source import of_the_file as of_the_file
from perfmodel.importers._source import read_program as read_program
from perfmodel.importers._table import OpTable as OpTable
from perfmodel.importers._table import StepEstimate as StepEstimate
from perfmodel.importers._torch_program import torch_program as torch_program
from perfmodel.importers._trace import read_sharded as read_sharded
from perfmodel.importers._trace import trace as trace

shorten_reprs(__name__)
