"""DistIR programs: functions of instructions over devices, in static single assignment form.

Build one with `Builder` or from `perfmodel.ir.models`, or `parse` its text; distribute it with
`perfmodel.ir.distribute`; execute and simulate it with `perfmodel.ir.execution`. No JAX here.
"""

from perfmodel.display import shorten_reprs
from perfmodel.ir._builder import Builder
from perfmodel.ir._cost import LiveMemory, Work, live_memory, work
from perfmodel.ir._function import Function, Module, inline, instruction_devices, lower
from perfmodel.ir._gradient import Adam, RankValues, Sgd, gradient, training_step
from perfmodel.ir._instruction import (
    INTEGER_DTYPES,
    ITEM_BYTES,
    STREAMS,
    UNTAGGED,
    Attributes,
    Instruction,
    Parameter,
    ProgramError,
    Shape,
    Stream,
    Tag,
    Tensor,
    attributes,
)
from perfmodel.ir._program import GlobalTensor, Piece, Program, undistributed
from perfmodel.ir._text import parse, parse_function, parse_program, to_text
from perfmodel.ir.ops import OPS

shorten_reprs(__name__)
