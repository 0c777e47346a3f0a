"""Configurations for live validation: training steps whose messages take longer than their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from perfmodel.program.distribute import Degrees, distribute, on_one_stream
from perfmodel.program.ir import Program
from perfmodel.program.ir.models import TransformerSize, mlp, training_step, transformer_loss


@dataclass(frozen=True, kw_only=True)
class LiveCase:
    """One configuration."""

    model: str
    degrees: Degrees
    ranks_per_host: int = 1

    @property
    def ranks(self) -> int:
        return self.degrees.n_devices

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host

    @property
    def name(self) -> str:
        """DistSim's notation with what is not usual, as `mlp-s 1M4P2D gpipe m8 zero1`."""
        d = self.degrees
        words = [self.model, f"{d.tensor}M{d.pipeline}P{d.data}D"]
        if d.pipeline > 1:
            words.append(d.schedule if d.chunks == 1 else f"{d.schedule}x{d.chunks}")
        if d.micro_batches > 1:
            words.append(f"m{d.micro_batches}")
        if d.zero:
            words.append(f"zero{d.zero}")
        if self.ranks_per_host > 1:
            words.append(f"{self.ranks_per_host} ranks a host")
        return " ".join(words)

    def program(self) -> Program:
        """On one stream, as real ranks run one instruction at a time."""
        return on_one_stream(distribute(_model(self.model), self.degrees))


@lru_cache(maxsize=8)
def _model(name: str) -> Program:
    models = {
        "mlp-s": lambda: mlp(512, (256,) * 9),
        "mlp-l": lambda: mlp(512, (384,) * 9),
        "check-mlp": lambda: mlp(384, (320,) * 5),
        "gpt": lambda: transformer_loss(TransformerSize(layers=4, hidden=192, heads=8, vocab=256, seq_len=32), 32),
        "check-gpt": lambda: transformer_loss(
            TransformerSize(layers=2, hidden=160, heads=4, vocab=192, seq_len=32), 24
        ),
    }
    return training_step(models[name]())


def check_cases() -> list[LiveCase]:
    """Two-rank programs that belong to the calibration: they tell how far a prediction may be off."""
    degrees = (Degrees(data=2), Degrees(tensor=2), Degrees(pipeline=2, micro_batches=4))
    return [LiveCase(model=model, degrees=d) for model in ("check-mlp", "check-gpt") for d in degrees]


def live_cases() -> list[LiveCase]:
    """What is predicted and then measured, none of it part of the calibration; by number of ranks."""
    return sorted(_live_cases(), key=lambda case: (case.ranks, case.hosts))


def _live_cases() -> Iterator[LiveCase]:
    for model in ("mlp-s", "mlp-l"):
        yield LiveCase(model=model, degrees=Degrees(data=2))
        yield LiveCase(model=model, degrees=Degrees(data=4))
        yield LiveCase(model=model, degrees=Degrees(tensor=2))
        yield LiveCase(model=model, degrees=Degrees(tensor=4))
        for schedule in ("gpipe", "1f1b"):
            for stages, micro_batches in ((2, 4), (4, 4), (4, 8), (8, 8)):
                yield LiveCase(
                    model=model, degrees=Degrees(pipeline=stages, micro_batches=micro_batches, schedule=schedule)
                )
        yield LiveCase(model=model, degrees=Degrees(pipeline=4, micro_batches=4, schedule="interleaved", chunks=2))
        yield LiveCase(model=model, degrees=Degrees(data=2, pipeline=2, micro_batches=4))
        yield LiveCase(model=model, degrees=Degrees(tensor=2, pipeline=2, micro_batches=4))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=8))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=2, pipeline=4, micro_batches=4))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=2, tensor=2, pipeline=2, micro_batches=2))
    for zero in (1, 2, 3):
        yield LiveCase(model="mlp-s", degrees=Degrees(data=4, zero=zero))
    yield LiveCase(model="mlp-s", degrees=Degrees(data=2, zero=1, pipeline=2, micro_batches=4, schedule="gpipe"))
    yield LiveCase(model="mlp-s", degrees=Degrees(pipeline=2, micro_batches=4, schedule="interleaved", chunks=2))
    for degrees in (
        Degrees(data=2),
        Degrees(data=4),
        Degrees(pipeline=2, micro_batches=4),
        Degrees(pipeline=4, micro_batches=4, schedule="gpipe"),
        Degrees(pipeline=4, micro_batches=8),
        Degrees(data=2, pipeline=2, micro_batches=4),
    ):
        yield LiveCase(model="gpt", degrees=degrees)
    yield LiveCase(model="mlp-s", degrees=Degrees(data=4), ranks_per_host=2)
    yield LiveCase(model="mlp-l", degrees=Degrees(tensor=2, pipeline=2, micro_batches=4), ranks_per_host=2)
    yield LiveCase(model="mlp-l", degrees=Degrees(tensor=2, data=2), ranks_per_host=2)
