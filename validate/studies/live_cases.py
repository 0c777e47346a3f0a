"""Configurations for live validation: training steps whose messages take longer than their kernels;
and collectives over more ranks than were calibrated, placed within and between hosts, in rings and
in two levels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, Literal

from perfmodel.ir import Program, parse_function, undistributed
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream
from perfmodel.ir.models import TransformerSize, mlp, training_step, transformer_loss


@dataclass(frozen=True, kw_only=True)
class LiveCase:
    """One configuration."""

    model: str
    degrees: Degrees
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.degrees.n_devices

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.ranks_per_host

    @property
    def name(self) -> str:
        """The configuration in DistSim's notation with its unusual settings, as `mlp-s 1M4P2D gpipe
        m8 zero1`."""
        degrees = self.degrees
        parts = [self.model, f"{degrees.tensor}M{degrees.pipeline}P{degrees.data}D"]
        if degrees.pipeline > 1:
            chunks = "" if degrees.chunks == 1 else f"x{degrees.chunks}"
            parts.append(f"{degrees.schedule}{chunks}")
        if degrees.micro_batches > 1:
            parts.append(f"m{degrees.micro_batches}")
        if degrees.zero:
            parts.append(f"zero{degrees.zero}")
        if self.ranks_per_host > 1:
            parts.append(f"{self.ranks_per_host} ranks a host")
        return " ".join(parts)

    def program(self) -> Program:
        """The program on one stream, because real ranks run one instruction at a time."""
        return on_one_stream(distribute(_model(self.model), self.degrees))


@lru_cache(maxsize=8)
def _model(name: str) -> Program:
    """A training step on one device, by name."""
    models = {
        "mlp-s": lambda: mlp(512, (256,) * 9),
        "mlp-l": lambda: mlp(512, (384,) * 9),
        "check-mlp": lambda: mlp(384, (320,) * 5),
        "gpt": lambda: transformer_loss(
            TransformerSize(layers=4, hidden=192, heads=8, vocab=256, seq_len=32), 32
        ),
        "check-gpt": lambda: transformer_loss(
            TransformerSize(layers=2, hidden=160, heads=4, vocab=192, seq_len=32), 24
        ),
    }
    return training_step(models[name]())


def check_cases() -> list[LiveCase]:
    """Two-rank programs of the calibration, which show how far a prediction may be off."""
    # One of each kind of parallelism, for each kind of model.
    degrees = (Degrees(data=2), Degrees(tensor=2), Degrees(pipeline=2, micro_batches=4))
    cases = product(("check-mlp", "check-gpt"), degrees)
    return [LiveCase(model=model, degrees=of_case) for model, of_case in cases]


def live_cases() -> list[LiveCase]:
    """Configurations that are predicted and then measured, by number of ranks; none is part of the
    calibration."""
    return sorted(_live_cases(), key=lambda case: (case.ranks, case.hosts))


def _live_cases() -> Iterator[LiveCase]:
    """All configurations of training steps."""
    # Perceptrons: each kind of parallelism alone and in pairs.
    for model in ("mlp-s", "mlp-l"):
        yield LiveCase(model=model, degrees=Degrees(data=2))
        yield LiveCase(model=model, degrees=Degrees(data=4))
        yield LiveCase(model=model, degrees=Degrees(tensor=2))
        yield LiveCase(model=model, degrees=Degrees(tensor=4))
        for schedule in ("gpipe", "1f1b"):
            for stages, micro_batches in ((2, 4), (4, 4), (4, 8), (8, 8)):
                yield LiveCase(
                    model=model,
                    degrees=Degrees(
                        pipeline=stages, micro_batches=micro_batches, schedule=schedule
                    ),
                )
        yield LiveCase(
            model=model,
            degrees=Degrees(pipeline=4, micro_batches=4, schedule="interleaved", chunks=2),
        )
        yield LiveCase(model=model, degrees=Degrees(data=2, pipeline=2, micro_batches=4))
        yield LiveCase(model=model, degrees=Degrees(tensor=2, pipeline=2, micro_batches=4))

    # All eight ranks, and states that are divided.
    yield LiveCase(model="mlp-s", degrees=Degrees(data=8))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=2, pipeline=4, micro_batches=4))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=2, tensor=2, pipeline=2, micro_batches=2))
    for zero in (1, 2, 3):
        yield LiveCase(model="mlp-s", degrees=Degrees(data=4, zero=zero))
    yield LiveCase(
        model="mlp-s",
        degrees=Degrees(data=2, zero=1, pipeline=2, micro_batches=4, schedule="gpipe"),
    )
    yield LiveCase(
        model="mlp-s",
        degrees=Degrees(pipeline=2, micro_batches=4, schedule="interleaved", chunks=2),
    )
    # A transformer: kernels of other kinds, and messages of other sizes.
    for degrees in (
        Degrees(data=2),
        Degrees(data=4),
        Degrees(pipeline=2, micro_batches=4),
        Degrees(pipeline=4, micro_batches=4, schedule="gpipe"),
        Degrees(pipeline=4, micro_batches=8),
        Degrees(data=2, pipeline=2, micro_batches=4),
    ):
        yield LiveCase(model="gpt", degrees=degrees)

    # Several ranks on a host: some messages pass no emulated link.
    yield LiveCase(model="mlp-s", degrees=Degrees(data=4), ranks_per_host=2)
    yield LiveCase(
        model="mlp-l", degrees=Degrees(tensor=2, pipeline=2, micro_batches=4), ranks_per_host=2
    )
    yield LiveCase(model="mlp-l", degrees=Degrees(tensor=2, data=2), ranks_per_host=2)


Algorithm = Literal["ring", "hierarchical", "inside", "across"]
_SIZES: Final = (524288, 2097152)
"""Bytes of a rank's buffer."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One way to sum buffers of all ranks, or of all ranks of smaller groups."""

    algorithm: Algorithm
    """`ring`: one all-reduce of all ranks. `hierarchical`: reduce-scatter within every host,
    all-reduce of each slice between the hosts, all-gather within every host (Cho et al. 2019,
    section 2). `inside`: one all-reduce per host. `across`: one all-reduce per place within the
    hosts, all of which share the hosts' links."""
    ranks: int
    ranks_per_host: int
    bytes: int

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.ranks_per_host

    @property
    def name(self) -> str:
        """The collective in words."""
        per_host = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)} a host"
        return f"{self.algorithm} all-reduce of {self.bytes // 1024} KiB, {self.ranks} ranks, {per_host}"

    def program(self) -> Program:
        """The program of the collectives: of each group in the order of the list, of all groups at
        the same time."""
        body = {
            "ring": self._ring,
            "hierarchical": self._hierarchical,
            "inside": self._inside,
            "across": self._across,
        }
        # The text is a program of the IR, as a user would write it.
        lines, results = body[self.algorithm]()
        elements = self.bytes // 4
        parameters = ", ".join(f"%x{r}: fp32[{elements}] @{r}" for r in range(self.ranks))
        text = [
            f"func @{self.algorithm}({parameters}) {{",
            *lines,
            f"  return {', '.join(results)}",
            "}",
        ]
        return undistributed(parse_function("\n".join(text)))

    def _groups_inside(self) -> list[list[int]]:
        """Ranks of each host."""
        return [
            list(range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host))
            for host in range(self.hosts)
        ]

    def _groups_across(self) -> list[list[int]]:
        """Ranks at the same place of all hosts, for each place."""
        return [
            list(range(place, self.ranks, self.ranks_per_host))
            for place in range(self.ranks_per_host)
        ]

    def _ring(self) -> tuple[list[str], list[str]]:
        """One all-reduce of all ranks."""
        return _calls("all_reduce", "x", "y", [list(range(self.ranks))])

    def _inside(self) -> tuple[list[str], list[str]]:
        """One all-reduce on each host."""
        return _calls("all_reduce", "x", "y", self._groups_inside())

    def _across(self) -> tuple[list[str], list[str]]:
        """One all-reduce between hosts for each place."""
        return _calls("all_reduce", "x", "y", self._groups_across())

    def _hierarchical(self) -> tuple[list[str], list[str]]:
        """Slices are summed within hosts, then between them, and gathered again."""
        # A host's links carry a slice of each rank's buffer, instead of all of it.
        scattered, _ = _calls("reduce_scatter", "x", "s", self._groups_inside(), " {axis=0}")
        reduced, _ = _calls("all_reduce", "s", "t", self._groups_across())
        gathered, results = _calls("all_gather", "t", "y", self._groups_inside(), " {axis=0}")
        return [*scattered, *reduced, *gathered], results


def _calls(
    op: str, source: str, target: str, groups: list[list[int]], attributes: str = ""
) -> tuple[list[str], list[str]]:
    """A line of the program for each group, and the names of the results."""

    lines: list[str] = []
    results: list[str] = []
    for group in groups:
        inputs = ", ".join(f"%{source}{rank}" for rank in group)
        outputs = [f"%{target}{rank}" for rank in group]
        lines.append(f"  {', '.join(outputs)} = {op}({inputs}){attributes}")
        results += outputs
    return lines, results


def collective_cases() -> list[CollectiveCase]:
    """Collectives on more than two ranks; the calibration has those of two."""
    shapes: list[tuple[Algorithm, int, int]] = [
        ("ring", 4, 1),
        ("ring", 8, 1),
        ("ring", 4, 2),
        ("ring", 8, 4),
        ("hierarchical", 4, 2),
        ("hierarchical", 8, 4),
        ("hierarchical", 8, 2),
        ("inside", 4, 2),
        ("across", 4, 2),
    ]
    return [
        CollectiveCase(algorithm=algorithm, ranks=ranks, ranks_per_host=per_host, bytes=size)
        for (algorithm, ranks, per_host), size in product(shapes, _SIZES)
    ]
