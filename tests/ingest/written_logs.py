"""Logs as training frameworks write them, of steps whose times a test knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

FORMATS = (
    "megatron",
    "megatron-bridge",
    "nemo",
    "torchtitan",
    "nanotron",
    "deepspeed",
    "hf-trainer",
    "maxtext",
    "composer",
    "olmo-core",
    "levanter",
    "nemo-automodel",
    "torchtune",
    "xtuner",
    "nanogpt",
    "llm.c",
    "fairseq",
    "paddlenlp",
)
_START = datetime(2025, 3, 4, 10, 0, 0)


@dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """A run that a test writes a log of."""

    step_s: Sequence[float]
    devices: int = 64
    global_batch: int = 512
    seq_len: int = 4096
    pause_after_s: dict[int, float] = field(default_factory=dict)
    """Seconds between a step and the next that belong to neither, by number of the step."""
    checkpoints: Sequence[int] = ()
    """Steps after which the log says that a checkpoint was saved."""
    evaluations: Sequence[int] = ()
    """Steps after which the log says that an evaluation ran; how long is in `pause_after_s`."""
    skipped: Sequence[int] = ()
    reserved_gib: float = 60.0
    flops_per_token: float = 5e10
    settings: dict[str, object] = field(default_factory=dict)
    """By the names of Megatron-LM's arguments; what `megatron` writes at its head."""
    timers_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of every step, fastest and slowest rank; what `megatron` writes below a step, and `deepspeed`
    of the slowest."""
    loader_s: float = 0.0
    """Seconds of each step that pass before its first kernel: DeepSpeed's rate leaves them out, and
    XTuner writes them as `data_time`."""
    stragglers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and most of the figures of Megatron-Core's straggler detector (`Rtt` and `DRtt` in ms,
    `Clk` in MHz)."""
    batches: Sequence[int] = ()
    """Sequences of each step where the batch grows over the run; empty where it is `global_batch`
    throughout."""

    def at(self, step: int) -> "WrittenRun":
        """Return the run with the batch of one step."""
        return replace(self, global_batch=self.batches[step - 1]) if self.batches else self

    def tokens_per_s_per_device(self, seconds: float) -> float:
        return self.global_batch * self.seq_len / self.devices / seconds

    def tflops_per_device(self, seconds: float) -> float:
        return self.flops_per_token * self.tokens_per_s_per_device(seconds) / 1e12


def write_log(form: str, run: WrittenRun) -> str:
    """The text of the log of a run by one of `FORMATS`."""
    lines = [
        f"  {name} {'.' * max(2, 40 - len(name))} {value}" for name, value in run.settings.items()
    ]
    now = _START
    for step, seconds in enumerate(run.step_s, start=1):
        now += timedelta(seconds=seconds)
        lines += _WRITERS[form](run.at(step), step, seconds, now)
        if form.startswith("megatron") and run.timers_ms:
            lines.append("(min, max) time across ranks (ms):")
            lines += [
                f"    {name} {'.' * (47 - len(name))}: ({a:.2f}, {b:.2f})"
                for name, (a, b) in run.timers_ms.items()
            ]
        if run.stragglers and step % 10 == 0:
            lines.append(_straggler_report(run, now))
        if form == "deepspeed" and run.timers_ms:
            lines.append(_deepspeed_timers(run))
        if step in run.checkpoints:
            lines.append(_checkpoint(form, step, run.pause_after_s.get(step, 0.0)))
        if step in run.evaluations:
            lines.append(_evaluation(form, step))
        now += timedelta(seconds=run.pause_after_s.get(step, 0.0))
    return "\n".join(lines) + "\n"


def _straggler_report(run: WrittenRun, now: datetime) -> str:
    figures = {
        "Pwr": (601796.0, 683801.0),
        "Tmp": (52.0, 65.0),
        "Utl": (97.0, 100.0),
    } | run.stragglers
    units = {"Rtt": "ms", "Pwr": "W", "Tmp": "C", "Utl": "%", "Clk": "MHz", "DRtt": "ms"}
    columns = []
    for name, unit in units.items():
        least, most = figures[name]
        columns.append(f"Mn{name}/Rnk: {least:.2f}{unit}/8 | Mx{name}/Rnk: {most:.2f}{unit}/0")
    return f" 0: INFO:megatron.core.utils:[{now:%Y-%m-%d %H:%M:%S}] | {' | '.join(columns)} | MnEtpt/Rnk: 296.02TF/0"


def _checkpoint(form: str, step: int, seconds: float) -> str:
    if form.startswith("megatron"):
        return (
            f"  successfully saved checkpoint from iteration {step:7d} to /ckpt [ t 1/1, p 1/1 ]\n"
            f"(min, max) time across ranks (ms):\n"
            f"    save-checkpoint ................................: ({seconds * 999:.2f}, {seconds * 1000:.2f})"
        )
    return {
        "torchtitan": f"[titan] INFO - Finished saving the checkpoint in {seconds:.2f} seconds.",
        "hf-trainer": f"Saving model checkpoint to out/checkpoint-{step}",
    }.get(form, f"INFO: Saved checkpoint at step {step}")


def _evaluation(form: str, step: int) -> str:
    return {
        "composer": "\t Eval metrics/eval/LanguagePerplexity: 12.3456",
        "hf-trainer": "{'eval_loss': 2.1, 'eval_runtime': 12.3, 'epoch': 0.12}",
        "torchtitan": f"[titan] INFO - validate step: {step}  loss:  2.1000",
        "nanogpt": f"step {step}: train loss 2.1000, val loss 2.1500",
        "llm.c": "val loss 2.150000",
        "fairseq": f"| valid | epoch 001 | valid on 'valid' subset | loss 2.1 | num_updates {step}",
        "paddlenlp": "[2025-03-04 10:00:00,000] [    INFO] - ***** Running Evaluation *****",
        "maxtext": f"eval metrics after step: {step}, loss=2.100, total_weights=65536",
    }.get(
        form, f" validation loss at iteration {step} on validation set | lm loss value: 2.1E+00 | "
    )


def _megatron(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    skipped = int(step in run.skipped)
    lines = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {step:8d}/   50000 | consumed samples: {step * run.global_batch:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1000:.1f} | throughput per GPU (TFLOP/s/GPU): "
        f"{run.tflops_per_device(seconds):.1f} | "
        f"learning rate: 1.500000E-06 | global batch size: {run.global_batch:5d} | lm loss: 1.012345E+01 | "
        f"loss scale: {65536.0 / 2**skipped:.1f} | grad norm: 5.123 | number of skipped iterations: {skipped:3d} | "
        "number of nan iterations:   0 |"
    ]
    if step == 1:
        mib = run.reserved_gib * 1024
        lines.insert(
            0,
            f"[Rank 0] (after 1 iterations) memory (MB) | allocated: {mib / 2:.1f} | max allocated: {mib * 0.9:.1f} | "
            f"reserved: {mib:.1f} | max reserved: {mib:.1f}",
        )
    return lines


def _bridge(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    said = f"Step Time : {seconds:.2f}s GPU utilization: {run.tflops_per_device(seconds):.1f}MODEL_TFLOP/s/GPU"
    return [said, *_megatron(run, step, seconds, now)]


def _nemo(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [
        f"Training epoch 0, iteration {step - 1}/999 | lr: 1.499e-06 | global_batch_size: {run.global_batch} | "
        f"global_step: {step - 1} | reduced_train_loss: 10.22 | train_step_timing in s: {seconds:.3f} | "
        f"consumed_samples: {step * run.global_batch}"
    ]


def _titan(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    rate = run.tokens_per_s_per_device(seconds)
    return [
        f"[rank0]:[titan] {now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} - root - INFO - \x1b[31mstep: {step:2d}"
        f"  \x1b[32mloss: 12.2345  \x1b[38;2;54;234;195mgrad_norm:  4.5678  \x1b[33mmemory: {run.reserved_gib:5.2f}GiB"
        f"(75.10%)  \x1b[34mtps: {round(rate):,}  \x1b[36mtflops: {run.tflops_per_device(seconds):.2f}  "
        "\x1b[35mmfu: 37.56%\x1b[39m"
    ]


def _shortened(value: float) -> str:
    """Format a number as nanotron does."""
    for suffix in ("", "K", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}P"


def _nanotron(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    rate = run.global_batch * run.seq_len / seconds
    return [
        f"{now:%m/%d/%Y %H:%M:%S} [INFO|DP=0|PP=0|TP=0|ip-10-0-0-1]: iteration: {step} / 1000 | consumed_tokens: "
        f"{_shortened(step * run.global_batch * run.seq_len)} | elapsed_time_per_iteration_ms: "
        f"{_shortened(seconds * 1000)} | tokens_per_sec: {_shortened(rate)} | tokens_per_sec_per_gpu: "
        f"{_shortened(rate / run.devices)} | global_batch_size: {_shortened(run.global_batch)} | lm_loss: 11.1 | "
        f"lr: 1.5e-07 | model_tflops_per_gpu: {run.tflops_per_device(seconds):.3g} | "
        "hardware_tflops_per_gpu: 150 | grad_norm: 10.2 | "
        f"cuda_memory_allocated: 12.3G | cuda_max_memory_reserved: {run.reserved_gib * 1.073741824:.4g}G"
    ]


def _deepspeed(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    stamp = f"[{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}]"
    rate = run.global_batch / (seconds - run.loader_s)
    lines = [
        f"{stamp} [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]"
    ]
    if step in run.skipped:
        lines.append(
            f"{stamp} [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted "
            "loss scale: 65536, reducing to 32768"
        )
    lines.append(
        f"{stamp} [INFO] [timer.py:260:stop] epoch=0/micro_step={step}/global_step={step}, "
        f"RunningAvgSamplesPerSec={rate}, CurrSamplesPerSec={rate}, MemAllocated=10.2GB, "
        f"MaxMemAllocated={run.reserved_gib * 0.9:.2f}GB"
    )
    return lines


def _deepspeed_timers(run: WrittenRun) -> str:
    timers = " | ".join(f"{name}: {most:.2f}" for name, (_, most) in run.timers_ms.items())
    return (
        f"[2025-03-04 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | {timers}"
    )


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return (
        f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
        if hours
        else f"{rest // 60:02d}:{rest % 60:02d}"
    )


def _rate(seconds: float) -> str:
    return f"{seconds:.2f}s/it" if seconds >= 1 else f"{1 / seconds:.2f}it/s"


def _trainer(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    elapsed = (now - _START).total_seconds()
    bar = f"\r  1%|▏         | {step}/1000 [{_clock(elapsed)}<1:53:10,  {_rate(seconds)}]"
    return [bar, "{'loss': 2.3456, 'grad_norm': 1.23, 'learning_rate': 5e-05, 'epoch': 0.12}"]


def _maxtext(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    rate = run.tokens_per_s_per_device(seconds)
    return [
        f"completed step: {step - 1}, seconds: {seconds:.3f}, TFLOP/s/device: "
        f"{run.tflops_per_device(seconds):.3f}, Tokens/s/device: {rate:.3f}, "
        "total_weights: 65536, loss: 10.123"
    ]


def _composer(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    samples = run.global_batch / seconds
    tokens = samples * run.seq_len
    metrics = {
        "time/batch": step - 1,
        "time/token": (step - 1) * run.global_batch * run.seq_len,
        "memory/peak_reserved_mem": f"{run.reserved_gib * 1.073741824:.4f}",
        "loss/train/total": "10.1234",
        "throughput/batches_per_sec": f"{1 / seconds:.4f}",
        "throughput/samples_per_sec": f"{samples:.4f}",
        "throughput/tokens_per_sec": f"{tokens:.4f}",
        "throughput/device/tokens_per_sec": f"{tokens / run.devices:.4f}",
        "throughput/device/mfu": "0.4567",
        "wall_clock/total": f"{(now - _START).total_seconds() / 3600:.4f}",
    }
    return [
        f"[batch={step}/1000]:",
        *(f"\t Train {name}: {value}" for name, value in metrics.items()),
    ]


def _olmo(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [
        f"{now:%Y-%m-%d %H:%M:%S}.000\thost\tolmo_core.train.callbacks.console_logger:94\tINFO\t"
        f"[step={step}/1,000,epoch=1,eta=2:03:04]",
        "    optim/total grad norm=0.4321",
        "    train/CE loss=10.12",
        "    throughput/total tokens=8,388,608",
        f"    throughput/device/TPS={run.tokens_per_s_per_device(seconds):,.4f}",
        "    throughput/device/TPS (actual avg)=12,345",
        "    throughput/device/MFU=40.12",
    ]


def _levanter(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    elapsed = (now - _START).total_seconds()
    return [
        f"{now:%Y-%m-%dT%H:%M:%S} - 0 - tqdm_loggable.tqdm_logging - INFO - Progress on:train {step}.0it/10.0kit "
        f"rate:{_rate(seconds)} remaining:1:05:15 elapsed:{_clock(elapsed)} postfix:loss=7.123"
    ]


def _automodel(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    rate = run.tokens_per_s_per_device(seconds)
    return [
        f"{now:%Y-%m-%d %H:%M:%S} | INFO | nemo_automodel | step {step} | epoch 0 | loss 1.2345 | grad_norm 1.2 | "
        f"lr 1.00e-05 | mem {run.reserved_gib * 0.9:.2f} GiB | tps {rate * run.devices:.2f}({rate:.2f}/gpu) | "
        "num_label_tokens 65536"
    ]


def _torchtune(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [
        f"Step {step} | loss:1.2345 lr:2e-05 tokens_per_second_per_gpu:{run.tokens_per_s_per_device(seconds)} "
        f"peak_memory_active:41.2 peak_memory_alloc:41.2 peak_memory_reserved:{run.reserved_gib}"
    ]


def _xtuner(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [
        f"{now:%m/%d %H:%M:%S} - mmengine - INFO - Iter(train) [ {step:3d}/1000]  lr: 2.0000e-05  eta: 1:42:10  "
        f"time: {seconds:.4f}  data_time: {run.loader_s + 0.0123:.4f}  memory: {run.reserved_gib * 1024 * 0.9:.0f}  "
        "loss: 1.2345"
    ]


def _nanogpt(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [f"iter {step - 1}: loss 5.4983, time {seconds * 1000:.2f}ms, mfu 45.10%"]


def _llm_c(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    rate = run.global_batch * run.seq_len / seconds
    return [
        f"step {step:4d}/1000 | loss 3.208939 (+nanz)| norm 1.4800 (+0.32z)| lr 3.00e-04 | "
        f"{seconds * 1000:.2f} ms | 48.1% bf16 MFU | {rate:.0f} tok/s"
    ]


def _fairseq(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    words = run.global_batch * run.seq_len
    return [
        f"{now:%Y-%m-%d %H:%M:%S} | INFO | train_inner | epoch 001: {step:6d} / 160368 loss=9.255, ppl=611.12, "
        f"wps={words / seconds:.1f}, ups={1 / seconds:.2f}, wpb={words:.1f}, bsz={run.global_batch}, "
        f"num_updates={step}, lr=2.8e-05, gnorm=3.23, train_wall={seconds:.0f}, gb_free=12.3, wall=1236"
    ]


def _paddle(run: WrittenRun, step: int, seconds: float, now: datetime) -> list[str]:
    return [
        f"[{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}] [    INFO] - loss: 9.2551, learning_rate: 2e-06, "
        f"global_step: {step}, current_memory_allocated: 7.549, max_memory_allocated: {run.reserved_gib * 0.9}, "
        f"max_memory_reserved: {run.reserved_gib}, interval_runtime: {seconds:.4f}, "
        f"interval_samples_per_second: {run.global_batch / seconds:.4f}, "
        f"interval_steps_per_second: {1 / seconds:.4f}, progress_or_epoch: 0.0"
    ]


_WRITERS = {
    "nanogpt": _nanogpt,
    "llm.c": _llm_c,
    "fairseq": _fairseq,
    "paddlenlp": _paddle,
    "nemo-automodel": _automodel,
    "torchtune": _torchtune,
    "xtuner": _xtuner,
    "megatron": _megatron,
    "megatron-bridge": _bridge,
    "nemo": _nemo,
    "torchtitan": _titan,
    "nanotron": _nanotron,
    "deepspeed": _deepspeed,
    "hf-trainer": _trainer,
    "maxtext": _maxtext,
    "composer": _composer,
    "olmo-core": _olmo,
    "levanter": _levanter,
}
