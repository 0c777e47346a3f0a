"""The results section of TiMePReSt's page."""

from pathlib import Path

from studies.schedule_tables import version_table
from studies.search_report import markdown_table
from studies.timeprest import PAPER, WITHIN, accuracy_table, settings_table, summary_table, usual_table


def timeprest_page(_folder: Path) -> str:
    """All tables."""
    settings = settings_table()
    summary = summary_table(settings)
    first, second = PAPER
    whole, most = int(summary["all"].sum()), float(summary["stage 1 saves, most"].max())
    return f"""## Results

{_versions()}

### VGG-16 on two machines against PipeDream (section 5, figures 15 and 16)

The paper: nearly {first:.0%} less memory on stage 0 and {second:.0%} on stage 1, and more epochs per hour; it tells
neither the cut of the network, nor N, nor what is between the machines. Here every cut, several N, mini-batches and
networks, each against PipeDream with the same cut, mini-batch and network (1: as fast). Of {len(settings)} settings
**{whole}** have both its memory (within {WITHIN:.0%} of the device) and more epochs per hour.

{markdown_table(summary)}
The reason is stage 1. PipeDream's last stage holds one version of its weights and one mini-batch, whose backward
follows its forward at once: there is no version to save, and nF1B has to keep the activations of all N micro-batches of
a mini-batch until its one backward. What it saves there, {most:.0%} at most, is working space of smaller passes. Stage
0, which stashes a version and a second mini-batch, can save half; but the order that does so waits for the other
stage, and the order that is faster lets more mini-batches in.

The cut that is fastest for PipeDream, at one network and N:

{markdown_table(usual_table(settings))}
### Epochs and time to an accuracy (figures 11 to 14)

Not VGG-16 on CIFAR-100 but a small network on a real map, land or sea, in two stages: mini-batches of one size for all
schedules, weights by each schedule's versions, time by its timeline.

{markdown_table(accuracy_table())}
The paper finds nF1B slower in epochs and faster in time than PipeDream. Epochs differ by no more than the seeds do
here; in time nF1B is slower, by the same reason as above: its one backward of a mini-batch takes as long as those of N
micro-batches, and the other stage waits for it.
"""


def _versions() -> str:
    versions = version_table()
    wrong = versions[versions.simulated != versions.paper]
    first = wrong.iloc[0]
    return f"""### Version difference (section 4.4)

Simulated for W and N from 2 to 16: floor((W + N - 2) / N) is right in {len(versions) - len(wrong)} of {len(versions)}
cases; the smallest counterexample is W = {first.W}, N = {first.N} (formula {first.paper}, simulated {first.simulated}).
ceil(W / (N + 1)) is right in {(versions.simulated == versions.closed_form).sum()}: successive backwards start N + 1
slots apart, not N. There is a single sequence of updates if and only if W <= N + 1 in all cases:
{((versions.sequences == 1) == (versions.W <= versions.N + 1)).all()}.

{markdown_table(wrong.head(5))}"""
