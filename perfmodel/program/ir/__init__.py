"""The distributed program: functions of instructions over devices, in static single assignment form.

Build one with `Builder` or from `perfmodel.program.ir.models`, or `parse` its text; distribute it with
`perfmodel.program.distribute`; execute and simulate it with `perfmodel.execution`. No JAX here.
"""

from perfmodel.display import shorten_reprs
from perfmodel.program.ir._builder import Builder as Builder
from perfmodel.program.ir._cost import Work as Work
from perfmodel.program.ir._cost import work as work
from perfmodel.program.ir._function import Function as Function
from perfmodel.program.ir._function import Module as Module
from perfmodel.program.ir._function import Typing as Typing
from perfmodel.program.ir._function import instruction_devices as instruction_devices
from perfmodel.program.ir._function import lower as lower
from perfmodel.program.ir._gradient import gradient as gradient
from perfmodel.program.ir._inline import inline as inline
from perfmodel.program.ir._instruction import STREAMS as STREAMS
from perfmodel.program.ir._instruction import UNTAGGED as UNTAGGED
from perfmodel.program.ir._instruction import Attributes as Attributes
from perfmodel.program.ir._instruction import Instruction as Instruction
from perfmodel.program.ir._instruction import Parameter as Parameter
from perfmodel.program.ir._instruction import ProgramError as ProgramError
from perfmodel.program.ir._instruction import Stream as Stream
from perfmodel.program.ir._instruction import Tag as Tag
from perfmodel.program.ir._instruction import attributes as attributes
from perfmodel.program.ir._memory import LiveMemory as LiveMemory
from perfmodel.program.ir._memory import live_memory as live_memory
from perfmodel.program.ir._op import REPLICATED as REPLICATED
from perfmodel.program.ir._op import Answer as Answer
from perfmodel.program.ir._op import OpDefinition as OpDefinition
from perfmodel.program.ir._op import Partial as Partial
from perfmodel.program.ir._op import Question as Question
from perfmodel.program.ir._op import Replicated as Replicated
from perfmodel.program.ir._op import Sharded as Sharded
from perfmodel.program.ir._op import Sharding as Sharding
from perfmodel.program.ir._parse import parse as parse
from perfmodel.program.ir._parse import parse_function as parse_function
from perfmodel.program.ir._parse import parse_program as parse_program
from perfmodel.program.ir._program import Piece as Piece
from perfmodel.program.ir._program import Program as Program
from perfmodel.program.ir._program import Whole as Whole
from perfmodel.program.ir._program import undistributed as undistributed
from perfmodel.program.ir._text import to_text as to_text
from perfmodel.program.ir._types import INTEGER_DTYPES as INTEGER_DTYPES
from perfmodel.program.ir._types import ITEM_BYTES as ITEM_BYTES
from perfmodel.program.ir._types import Shape as Shape
from perfmodel.program.ir._types import Tensor as Tensor
from perfmodel.program.ir.ops import OPS as OPS

shorten_reprs(__name__)
