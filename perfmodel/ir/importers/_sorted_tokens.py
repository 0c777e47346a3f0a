"""Rewrites experts that sort tokens, so that each token takes the weights of its expert.

A grouped product wants the tokens of one expert next to one another. Models therefore sort the
tokens by expert, multiply, and put the results back into the tokens' order. How many tokens each
expert gets depends on data, which no program of fixed shapes can say. Yet every op between sorting
and putting back works on each row by itself, so that the order of rows does not matter: the same
results come from rows in their first order and, for each row, the product with the weights of its
expert. Where any op in between is not known to work row by row, nothing is rewritten.
"""

import operator
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

ROW_WISE: Final = frozenset({"to", "_to_copy", "clone", "contiguous", "alias", "detach"})
"""Ops other than pointwise ones that return the same rows."""
ALONG_AXIS: Final = frozenset(
    {"chunk", "split", "split_with_sizes", "unsqueeze", "slice", "softmax", "_softmax"}
)
"""Ops that work on each row by itself if their axis is not the rows'."""
COUNTS: Final = frozenset({"to", "_to_copy", "histc", "bincount", "cumsum"})
"""Ops by which the rows of each expert are counted."""
_ORDER, _TOKENS, _BLANK, _INVERSE, _IDS, _COUNTS, _ROWS = (
    *("order", "tokens", "blank", "inverse", "sorted ids", "counts", "rows"),
)
"""Kinds of nodes that depend on the sorting: origins of rows, their tokens, memory for the inverse
order, the inverse order, sorted experts, numbers of rows by expert, rows in sorted order."""


def by_token(torch: Any, graph: Any) -> Any:
    """Replace routing that sorts tokens by expert with routing token by token, in a copy of a graph
    of `torch.export`. A graph without such a sort is returned unchanged.

    Args:
        torch: the package.
        graph: a `torch.fx.Graph`, which is left as it is.
    """
    if not any(_name(node) == "sort" for node in graph.nodes):
        return graph
    copied = deepcopy(graph)
    for sort in [node for node in copied.nodes if _name(node) == "sort"]:
        routing = _Routing(torch, copied, sort)
        if routing.understood():
            routing.rewrite()
    return copied


@dataclass
class _Routing:
    """One sorting of tokens by their experts, and the nodes that depend on it."""

    torch: Any
    graph: Any
    sort: Any
    kinds: dict[Any, str] = field(default_factory=dict)
    per_token: int = 1
    """Experts of each token, hence rows."""

    def understood(self) -> bool:
        """Whether all nodes that depend on the order are known, with a grouped product."""
        if len(_example(self.sort.args[0]).shape) != 1:
            return False
        self.kinds[self.sort] = "sort"
        has_product = False
        # Nodes stand in the order in which they are computed.
        for node in self.graph.nodes:
            operands = [kind for kind in map(self.kinds.get, node.all_input_nodes) if kind]
            if not operands or _name(node) == "_assert_tensor_metadata":
                continue
            if self._puts_back(node):
                continue
            kind = self._kind(node)
            if not kind:
                return False
            has_product = has_product or "grouped_mm" in _name(node)
            self.kinds[node] = kind
        return has_product

    def _kind(self, node: Any) -> str:
        """The kind of a node, from the kinds of its operands; empty if unknown."""
        name = _name(node)
        if node.args and not isinstance(node.args[0], list):
            first = self.kinds.get(node.args[0], "")
        else:
            first = ""
        if node.target is operator.getitem and first == "sort":
            # A sort returns the sorted experts, then the order of the tokens.
            return _IDS if node.args[1] == 0 else _ORDER
        if first == _ORDER and name == "floor_divide" and isinstance(node.args[1], int):
            self.per_token = node.args[1]
            return _TOKENS
        if first == _ORDER and name in ("empty_like", "new_empty"):
            return _BLANK
        if first == _ORDER and name == "argsort":
            return _INVERSE
        if first == _BLANK and name in ("index_put", "index_put_"):
            (places,), written = node.args[1], node.args[2]
            inverts = self.kinds.get(places) == _ORDER and _name(written) == "arange"
            return _INVERSE if inverts else ""

        # Numbers of rows of each expert, rows in sorted order, and their products.
        if first in (_IDS, _COUNTS) and name in COUNTS:
            return _COUNTS
        if name == "index" and not first and len(node.args[1]) == 1:
            return _ROWS if self.kinds.get(node.args[1][0]) in (_ORDER, _TOKENS, _IDS) else ""
        if "grouped_mm" in name:
            rows, weights, counts = node.args[:3]
            is_product = (self.kinds.get(rows), self.kinds.get(counts)) == (_ROWS, _COUNTS)
            return _ROWS if is_product and weights not in self.kinds else ""
        return _ROWS if self._is_row_wise(node) else ""

    def _is_row_wise(self, node: Any) -> bool:
        """Whether a node's rows depend only on the same rows of its operands."""
        if node.target is operator.getitem:
            return self.kinds.get(node.args[0]) == _ROWS
        name = _name(node)
        tags = getattr(node.target, "tags", ())
        n_rows = _example(self.sort.args[0]).shape[0]
        for operand in node.all_input_nodes:
            if operand in self.kinds and self.kinds[operand] != _ROWS:
                return False
            # Operands that are not sorted must be the same for all rows.
            shape = _example(operand).shape
            n_axes = len(_first(_example(node)).shape)
            if operand not in self.kinds and len(shape) == n_axes and shape[0] == n_rows:
                return False
        if name in ALONG_AXIS:
            return self._axis(node) != 0
        return self.torch.Tag.pointwise in tags or name in ROW_WISE

    def _axis(self, node: Any) -> int:
        """Axis along which a node works, counted from the first."""
        arguments = node.target._schema.arguments
        values = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
        values |= {
            argument.name: value for argument, value in zip(arguments, node.args, strict=False)
        }
        values |= node.kwargs
        n_axes = len(_example(node.args[0]).shape) + (_name(node) == "unsqueeze")
        return values["dim"] % n_axes

    def _puts_back(self, node: Any) -> bool:
        """Whether a node brings rows back into the tokens' order."""
        if _name(node) != "index" or len(node.args[1]) != 1:
            return False
        return (self.kinds.get(node.args[0]), self.kinds.get(node.args[1][0])) == (_ROWS, _INVERSE)

    def rewrite(self) -> None:
        """Put rows back into their original order, and make each grouped product one per row."""
        aten = self.torch.ops.aten
        ids = self.sort.args[0]
        for node in [*self.graph.nodes]:
            if self._puts_back(node):
                node.replace_all_uses_with(node.args[0])
                self.kinds[node] = _ROWS
            elif _name(node) == "index" and node in self.kinds:
                x, (places,) = node.args
                order = self.kinds[places]
                if order == _IDS:
                    replacement = self._call(node, aten.index.Tensor, x, [ids])
                elif order == _TOKENS:
                    replacement = self._call(
                        node, aten.repeat_interleave.self_int, x, self.per_token, 0
                    )
                else:
                    replacement = x
                node.replace_all_uses_with(replacement)
            elif node in self.kinds and "grouped_mm" in _name(node):
                node.replace_all_uses_with(self._own_product(node, ids))
        # The remaining instructions of the sorting are used only by one another.
        for node in reversed([*self.graph.nodes]):
            operands = node.all_input_nodes
            is_check = _name(node) == "_assert_tensor_metadata" and any(
                operand in self.kinds for operand in operands
            )
            if is_check or (node in self.kinds and not node.users):
                self.graph.erase_node(node)

    def _own_product(self, node: Any, ids: Any) -> Any:
        """Product of each row with the weights of its expert."""
        aten = self.torch.ops.aten
        rows, weights = node.args[:2]
        # Weights [experts, rows, columns] that are read transposed are taken untransposed, so that
        # no copy is made of them; each row of tokens is then a column.
        is_transposed = False
        if _name(weights) == "transpose":
            is_transposed = {axis % 3 for axis in weights.args[1:]} == {1, 2}
        if is_transposed:
            weights_of_rows = self._call(node, aten.index.Tensor, weights.args[0], [ids])
            columns = self._call(node, aten.unsqueeze.default, rows, -1)
            product = self._call(node, aten.bmm.default, weights_of_rows, columns)
        else:
            weights_of_rows = self._call(node, aten.index.Tensor, weights, [ids])
            lines = self._call(node, aten.unsqueeze.default, rows, 1)
            product = self._call(node, aten.bmm.default, lines, weights_of_rows)
        return self._call(node, aten.squeeze.dim, product, -1 if is_transposed else 1)

    def _call(self, before: Any, target: Any, *arguments: Any) -> Any:
        """A new node before another, with an example of its result."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, arguments)
        examples = self.torch.fx.map_arg(arguments, lambda operand: operand.meta["val"])
        node.meta["val"] = target(*examples)
        return node


def _name(node: Any) -> str:
    """Name of a node's op without namespace and overload; empty if the node is not an op."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return "" if schema is None else schema.name.rpartition("::")[2]


def _example(node: Any) -> Any:
    return node.meta["val"]


def _first(example: Any) -> Any:
    return example[0] if isinstance(example, Sequence) else example
