"""PyTorch modules as programs of the IR, through `torch.export` (extra `torch`)."""

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ir import Program, RankValues
from perfmodel.ir.distribute import all_ranks
from perfmodel.ir.importers._emitter import Known, Missing, Ref
from perfmodel.ir.importers._foreign import Graph, label_of
from perfmodel.ir.importers._sorted_tokens import by_token
from perfmodel.ir.models import training_step


def torch_program(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
    ranks: int = 1,
) -> Program:
    """A PyTorch module as an IR program: its parameters under their own names, the tensors it is
    called with as data.

    The module is exported by `torch.export` on the CPU; its weights are not looked at and may be on
    the `meta` device. If a result is a scalar, the loss, `perfmodel.ir.models.training_step` turns
    the program into a training step::

        with torch.device("meta"):
            model = Model()
        program = torch_program(model, (torch.zeros(8, 128, dtype=torch.int64, device="meta"),))

    Args:
        module: an `nn.Module`, or an `ExportedProgram` (then without `args` and `kwargs`).
        args, kwargs: example arguments; samples along the first axis of tensors.
        values: tensor arguments, by parameter name, that shapes or masks depend on; a number fills
            the shape.
        ranks: number of ranks that call the module's collectives together. The program then
            represents all of them: simulations treat them alike, and `rank_program` writes them all
            down.

    Raises:
        PerfModelError: the extra is not installed, a module that cannot be exported, an unknown
            argument, a buffer without values, or ops that no op of the IR stands for, all named.
    """
    torch = load_torch()
    # `torch.export` traces on fake tensors, so weights on `meta` suffice.
    exported = module
    if not isinstance(module, torch.export.ExportedProgram):
        try:
            exported = torch.export.export(module, tuple(args), dict(kwargs or {}))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PerfModelError(
                f"{type(module).__name__}: torch.export cannot read it: {reason}; "
                "make it exportable (no branches on data), or give the values that it branches on as constants"
            ) from error
    # A program assigns every value once, so that what is written in place becomes a new value.
    if _written_through(exported.graph):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its own functions
            exported = exported.run_decompositions({})
    return _Reader(
        torch, exported, dict(values or {}), name or type(module).__name__, ranks
    ).program()


def rank_program(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    sharded: Mapping[str, int] | None = None,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
    trains: bool | None = False,
) -> Program:
    """Extend one rank's program of a tensor-parallel module to all ranks.

    A stage of Megatron-LM holds this rank's part of the weights and calls collectives on its
    tensor-parallel group; all ranks run the same code. `torch.export` keeps the collectives in
    their functional form. Values that a rank computes from its own number (an offset into the
    vocabulary) are assumed to be equal on all ranks, so stages with such code are translated
    wrongly.

    Args:
        module, args, kwargs, values, name: as for `torch_program`; weights and arguments are those
            of this rank.
        ranks: size of the group; all collectives must be on it.
        sharded: axis along which ranks hold a parameter, argument or result in turn, by its name in
            the program; others are alike on all ranks. Parameters marked as Megatron-LM marks them
            (`tensor_model_parallel`, `partition_dim`) need not be named.
        trains: whether the training step is wanted, of the mean of the ranks' losses; None: where
            the module returns a loss. The backward pass follows from the forward pass, not from the
            module's own functions.

    Raises:
        PerfModelError: as `torch_program`; a group of other size, a name that is not a tensor of
            the program, or a module that is to be trained but returns no loss.
    """
    if ranks < 2:
        raise PerfModelError(
            f"rank_program: needs at least 2 ranks, got ranks={ranks}; use torch_program for a single rank"
        )
    program = torch_program(module, args, kwargs, values=values, name=name, ranks=ranks)
    names = {tensor.name for tensor in program.inputs}
    axes = {}
    for label, parameter in module.named_parameters():
        # Unused parameters are none of the program's.
        if getattr(parameter, "tensor_model_parallel", False) and label_of(label) in names:
            axes[label_of(label)] = int(parameter.partition_dim)
    axes |= dict(sharded or {})
    returns_loss = any(output.role == "loss" for output in program.outputs)
    if not (returns_loss if trains is None else trains):
        return all_ranks(program, ranks, axes)

    # The step returns a gradient and a new value of every parameter, held as the parameter is.
    step = training_step(program, ranks=RankValues.of(program, ranks, axes))
    for weight in program.inputs_of("parameter"):
        if weight.name in axes:
            axes[f"d_{weight.name}"] = axes[weight.name]
    return all_ranks(step, ranks, axes)


_COLLECTIVES = "_c10d_functional::"
"""Namespace of torch's collectives in graphs."""
_SHAPE_ONLY = frozenset(
    {
        *("new_zeros", "new_ones", "new_full", "new_empty"),
        *("zeros_like", "ones_like", "full_like", "empty_like"),
    }
)
"""Ops that only use their operand's shape and element type."""


def load_torch() -> Any:
    """The package `torch` (raises `PerfModelError` if the extra is not installed)."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PerfModelError(
            "reading PyTorch modules needs torch; install perfmodel[torch]"
        ) from None
    return torch


def _written_through(graph: Any) -> bool:
    """Whether a value is read by its old name after a write into it or a view of it."""
    # Decomposition replaces in-place ops, but also fused ones that the IR has, so it is done only
    # where a stale name is read.
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node, k in place.items():
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        # Writing into a view writes into what it views, and so on down.
        written = node.args[0]
        while written is not None:
            if any(place[user] > k for user in written.users):
                return True
            written = written.args[0] if _is_view(written) else None
    return False


def _is_view(node: Any) -> bool:
    """Whether a node returns its operand's own memory."""
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    )


class _Reader:
    def __init__(
        self, torch: Any, exported: Any, values: dict[str, Any], name: str, ranks: int
    ) -> None:
        self.torch = torch
        self.exported = exported
        self.nodes = by_token(torch, exported.graph).nodes
        self.values = values
        self.ranks = ranks
        self.graph = Graph(name)

    def program(self) -> Program:
        """The program of an exported module; weights that it holds become parameters."""
        signature = self.exported.graph_signature
        parameters = signature.inputs_to_parameters
        buffers = signature.inputs_to_buffers
        constants = getattr(signature, "inputs_to_lifted_tensor_constants", {})
        # Updated buffers are outputs of the graph too, but not of the module.
        wanted = frozenset(signature.user_outputs)
        outputs: list[Any] = []
        for node in self.nodes:
            if node.op == "placeholder" and node.name in parameters:
                self._weight(node, parameters[node.name])
            elif node.op == "placeholder" and (node.name in buffers or node.name in constants):
                self._constant(node, buffers.get(node.name) or constants[node.name])
            elif node.op == "placeholder":
                self._argument(node)
            elif node.op == "output":
                outputs += self._outputs(node, wanted)
            else:
                self.graph.values[node.name] = self._call(node)
        if self.values:
            raise PerfModelError(
                f"{self.graph.name}: the module has no argument named {', '.join(self.values)}"
            )
        return self.graph.program(outputs)

    def _outputs(self, node: Any, wanted: frozenset[str]) -> Iterator[Any]:
        """Values that the graph's last node returns, of the wanted names."""
        for returned in node.args[0]:
            if getattr(returned, "name", None) in wanted:
                yield from _listed(self.graph.values[returned.name])

    def _weight(self, node: Any, label: str) -> None:
        """A parameter, under the first of its names if modules share it."""
        # Tied weights are one tensor under two names; they must become one parameter.
        tensor = node.meta["val"]
        state = self.exported.state_dict
        for first_name, named_tensor in state.items():
            if named_tensor is state[label]:
                label = first_name
                break
        if label not in self.graph.values:
            self.graph.weight(label, _dtype(tensor), tuple(tensor.shape))
        self.graph.values[node.name] = self.graph.values[label]

    def _constant(self, node: Any, label: str) -> None:
        """Make a buffer of the module a known value."""
        buffer = self.exported.state_dict.get(label, self.exported.constants.get(label))
        if buffer is None or buffer.is_meta:
            raise PerfModelError(
                f"{self.graph.name}: buffer {label} has no values; make the module on the CPU, or move only its "
                "parameters to the meta device"
            )
        self.graph.values[node.name] = self._known(buffer)

    def _argument(self, node: Any) -> None:
        tensor = node.meta["val"]
        if not hasattr(tensor, "shape"):
            self.graph.values[node.name] = tensor
        else:
            self.graph.input(node.name, _dtype(tensor), tuple(tensor.shape), self.values)

    def _call(self, node: Any) -> Any:
        """The result of a call of an ATen op."""
        # Results of several outputs are lists; ops with one are not.
        if node.target is operator.getitem:
            results = _listed(self.graph.values[node.args[0].name])
            return results[node.args[1]] if len(results) > 1 else results[0]
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            raise PerfModelError(
                f"{self.graph.name}: {node.target} is not an ATen op; rewrite the model without it"
            )
        # Assertions return nothing.
        if not schema.returns:
            return None
        # Arguments by position, defaults filled in, so that rules need not know how a call was
        # written.
        args = []
        for k, argument in enumerate(schema.arguments):
            if k < len(node.args):
                value = node.args[k]
            else:
                value = node.kwargs.get(argument.name, getattr(argument, "default_value", None))
            args.append(self._item(value))
        op = node.target.name().removeprefix("aten::")
        result = node.meta.get("val")
        attributes: dict[str, Any] = {"ranks": self.ranks} if op.startswith(_COLLECTIVES) else {}
        if isinstance(result, self.torch.Tensor):
            attributes["to_dtype"] = _dtype(result)
        if op in _SHAPE_ONLY:
            outputs = self._computed(node)
        else:
            outputs = self.graph.node(op, node.name, args, attributes, lambda: self._computed(node))
        returns_list = str(schema.returns[0].type).startswith("List")
        return outputs if len(schema.returns) > 1 or returns_list else outputs[0]

    def _item(self, value: Any) -> Any:
        """Replace nodes by their values, in an argument or a list of arguments."""
        if isinstance(value, self.torch.fx.Node):
            return self.graph.values[value.name]
        if isinstance(value, (list, tuple)) and any(
            isinstance(v, self.torch.fx.Node) for v in value
        ):
            return [self._item(v) for v in value]
        return value

    def _computed(self, node: Any) -> list[Any]:
        """A node whose result follows from known operands, by torch itself on the CPU."""

        def tensor(value: Any) -> Any:
            """A tensor on which torch can compute: the known value, or zeros of its shape."""
            item = self.graph.values[value.name]
            # Ops like `zeros_like` are the only ones computed from data, of which they see no
            # element.
            if isinstance(item, (Ref, Missing)):  # only its shape counts
                example = value.meta["val"]
                return self.torch.zeros(example.shape, dtype=example.dtype)
            if not isinstance(item, Known):
                return item
            array = self.torch.from_numpy(np.array(item.array))
            return array.to(value.meta["val"].dtype)

        args, kwargs = self.torch.fx.map_arg((node.args, dict(node.kwargs)), tensor)
        on_cpu = {"device": self.torch.device("cpu")} if kwargs.get("device") is not None else {}
        results = node.target(*args, **{**kwargs, **on_cpu})
        return [
            self._known(result)
            for result in (results if isinstance(results, (list, tuple)) else [results])
        ]

    def _known(self, value: Any) -> Any:
        if not isinstance(value, self.torch.Tensor):
            return value
        wide = value.float() if value.dtype == self.torch.bfloat16 else value
        return Known.of(wide.detach().cpu().numpy())


def _listed(item: Any) -> list[Any]:
    return item if isinstance(item, list) else [item]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
