"""A structure as people read it: a list of instructions, text, or a data frame."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from perfmodel.program._structure import N_STREAMS, Kind, Stream, Structure

if TYPE_CHECKING:
    import pandas as pd


class Predecessor(NamedTuple):
    """An op that must end first, and the transfer that must follow it."""

    op: int
    lag: Kind
    """`Kind.ZERO` where nothing lies between."""
    lag_stage: int


class ProgramInstruction(NamedTuple):
    """One op of a structure. Joins have device, position, stage and segment -1 and no stream."""

    op: int
    device: int
    stream: Stream | None
    position: int
    """Place on its stream."""
    kind: Kind
    stage: int
    segment: int
    micro_batch: int
    predecessors: tuple[Predecessor, ...]

    def __str__(self) -> str:
        where = f"device {self.device:<3} {self.stream.name:<9}" if self.stream is not None else "join" + " " * 16
        what = [self.kind.name]
        what += [
            f"{name} {value}"
            for name, value in (
                ("stage", self.stage),
                ("segment", self.segment),
                ("micro-batch", self.micro_batch),
            )
            if value >= 0
        ]
        after = ", ".join(
            f"{p.op}" + (f" + {p.lag.name} of stage {p.lag_stage}" if p.lag else "") for p in self.predecessors
        )
        return f"{self.op:>6}  {where}  {' '.join(what)}" + (f"  after {after}" if after else "")


def instructions(structure: Structure) -> list[ProgramInstruction]:
    """Every op in program order."""
    device, position = structure.device.tolist(), _position(structure).tolist()
    stage, segment = (column.tolist() for column in _stage_and_segment(structure))
    stream, kind, micro_batch = (
        structure.stream.tolist(),
        structure.kind.tolist(),
        structure.micro_batch.tolist(),
    )
    pred, lag = structure.pred.tolist(), structure.lag.tolist()
    return [
        ProgramInstruction(
            op,
            device[op],
            Stream(stream[op] % N_STREAMS) if stream[op] >= 0 else None,
            position[op],
            Kind(kind[op]),
            stage[op],
            segment[op],
            micro_batch[op],
            tuple(
                Predecessor(
                    before,
                    Kind(structure.class_kind[delay]),
                    int(structure.class_stage[delay]) if delay else -1,
                )
                for before, delay in zip(pred[op], lag[op], strict=True)
                if before >= 0
            ),
        )
        for op in range(structure.n_ops)
    ]


def to_text(structure: Structure) -> str:
    """One line per op in program order."""
    return "\n".join(map(str, instructions(structure)))


def to_frame(structure: Structure) -> "pd.DataFrame":
    """One row per op in program order.

    Columns: `op`, `device`, `stream`, `position` (on its stream), `kind`, `stage`, `segment`,
    `micro_batch`, `pred_0`, `pred_1`, `lag_0`, `lag_1` (kind of the delay after the predecessor). -1
    stands for none, as do the stream `-` and the lag `ZERO`.
    """
    import pandas as pd

    kinds = [kind.name for kind in Kind]
    streams = [*(stream.name for stream in Stream), "-"]
    stage, segment = _stage_and_segment(structure)
    stream = np.where(structure.stream < 0, N_STREAMS, structure.stream % N_STREAMS)
    lag_kind = structure.class_kind[structure.lag]
    return pd.DataFrame(
        {
            "op": np.arange(structure.n_ops),
            "device": structure.device,
            "stream": pd.Categorical.from_codes(stream, categories=streams),
            "position": _position(structure),
            "kind": pd.Categorical.from_codes(structure.kind, categories=kinds),
            "stage": stage,
            "segment": segment,
            "micro_batch": structure.micro_batch,
            "pred_0": structure.pred[:, 0],
            "pred_1": structure.pred[:, 1],
            "lag_0": pd.Categorical.from_codes(lag_kind[:, 0], categories=kinds),
            "lag_1": pd.Categorical.from_codes(lag_kind[:, 1], categories=kinds),
        }
    )


def _position(structure: Structure) -> Int[np.ndarray, " ops"]:
    """Place of each op on its stream, -1 for joins."""
    order = np.argsort(structure.stream, kind="stable")
    count = np.bincount(structure.stream + 1)
    start = (np.cumsum(count) - count)[structure.stream[order] + 1]
    position = np.empty(structure.n_ops, np.int64)
    position[order] = np.arange(structure.n_ops) - start
    return np.where(structure.stream < 0, -1, position)


def _stage_and_segment(structure: Structure) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " ops"]]:
    join = structure.duration == 0
    stage, segment = structure.class_stage[structure.duration], structure.class_segment[structure.duration]
    return np.where(join, -1, stage), np.where(join, -1, segment)
