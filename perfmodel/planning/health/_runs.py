"""Launch scripts with the logs of their runs, as measured runs for `calibrate_end_to_end`."""

from collections.abc import Sequence
from pathlib import Path

from perfmodel.calibration import Run
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import read_launch, save_every
from perfmodel.ingest.logs import read_log
from perfmodel.planning.health._contradictions import what_ran
from perfmodel.planning.health._series import step_series
from perfmodel.prediction import layout_of
from perfmodel.spec import Cluster


def runs_of_logs(
    pairs: Sequence[tuple[Path | str, Path | str]],
    cluster: Cluster | str,
    *,
    devices: int | None = None,
) -> list[Run]:
    """Make a measured run from each launch script and its log, with the typical step time without
    warm-up and stalls.

    Where a log and its script state different layouts, batches or options, the log counts.

        runs = pm.runs_of_logs([("small.sh", "small.log"), ("large.sh", "large.log")], "dgx-h100")
        calibrate_end_to_end(runs, out="mine")

    Args:
        pairs: (launch script, log).
        cluster: cluster on which all of them ran.
        devices: number of devices, for scripts that do not state it.

    Raises:
        LaunchFileError: a script that leaves model, layout or batch open.
        TableError, PerfModelError: not a log, too short a log, or a log of another script.
    """
    runs = []
    for script, log_path in pairs:
        launch = read_launch(str(script), devices=devices)
        if launch.layout is None:
            raise LaunchFileError(f"{launch.path}: {'; '.join(launch.missing)}")
        problem = launch.problem(cluster)
        log = read_log(log_path)
        job = what_ran(problem, launch.layout, log)
        layout, _ = layout_of(job.problem, job.ran)
        global_batch, seq_len = job.problem.job.global_batch, job.problem.job.seq_len

        # If the log does not report checkpoints, the script's save interval identifies the stalls
        # that are checkpoints.
        save_period = save_every(Path(launch.path).read_text(errors="replace"))
        series = step_series(log, global_batch * seq_len, layout.devices, global_batch, save_period)
        runs.append(
            Run(
                name=Path(log_path).name,
                model=job.problem.model,
                cluster=job.problem.cluster,
                job=job.problem.job,
                layout=layout,
                measured_s=series.usual_s,
                framework=job.problem.framework,
            )
        )
    return runs
