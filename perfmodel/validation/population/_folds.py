"""Folds of runs to leave out together: teams, frameworks, generations, years, model kinds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.prediction.sites.constants import keys_share_a_team

WHOLE_GROUPS: Final = ("framework", "architecture", "year", "model_kind")
"""Labels whose groups are left out whole, to measure errors for groups that were never seen."""


@dataclass(frozen=True, eq=False)
class Folds:
    """Sets of runs that are left out in turn; each run is predicted in at most one of them."""

    names: tuple[str, ...]
    """Name of the group that each fold leaves out."""
    left_out: Bool[np.ndarray, "folds runs"]
    """Runs that each fold leaves out."""
    predicted: Bool[np.ndarray, "folds runs"]
    """Runs that each fold predicts, among those that it leaves out."""

    def only(self, name: str) -> "Folds":
        """Return a single fold."""
        fold = [self.names.index(name)]
        return Folds((name,), self.left_out[fold], self.predicted[fold])

    def by_size(self) -> "list[PaddedFolds]":
        """Return the folds in batches of similar size, each padded to its largest; a fold's size is
        the number of runs that it leaves out.

        JAX needs arrays of one shape. The work of a fold grows with the cube of its size, so that
        one batch as wide as the largest fold would spend most of its time on padding.
        """
        places = [np.flatnonzero(left_out) for left_out in self.left_out]
        # Folds of one batch differ by up to a factor of four in size: more batches take longer to
        # compile.
        quadruplings = np.ceil(np.log([len(place) for place in places]) / np.log(4))
        batches = []
        for quadrupling in np.unique(quadruplings):
            folds = np.flatnonzero(quadruplings == quadrupling)
            most = max(len(places[fold]) for fold in folds)
            index = np.zeros((len(folds), most), int)
            is_run = np.zeros(index.shape, bool)
            for row, fold in enumerate(folds):
                index[row, : len(places[fold])] = places[fold]
                is_run[row, : len(places[fold])] = True
            predicted = is_run & np.take_along_axis(self.predicted[folds], index, axis=1)
            batches.append(PaddedFolds(index, is_run, predicted))
        return batches


class PaddedFolds(NamedTuple):
    """Folds of similar size, each with as many entries as the largest."""

    index: Int[np.ndarray, "folds most"]
    """Runs that each fold leaves out; 0 where an entry is padding."""
    is_run: Bool[np.ndarray, "folds most"]
    """Whether an entry is a run."""
    predicted: Bool[np.ndarray, "folds most"]
    """Whether an entry is a run that its fold predicts."""


def team_folds(teams: Sequence[str]) -> Folds:
    """One fold per team, which leaves out all runs that share a team with it.

    Args:
        teams: teams of every run, joined by `+` (`perfmodel.prediction.sites.constants.team_key`).
    """
    names = sorted(set(teams))
    left_out = np.zeros((len(names), len(teams)), bool)
    predicted = np.zeros((len(names), len(teams)), bool)
    for fold, name in enumerate(names):
        for run, team in enumerate(teams):
            # A run of two teams is left out with either of them, but predicted once, in the fold
            # of its own key.
            left_out[fold, run] = keys_share_a_team(name, team)
            predicted[fold, run] = name == team
    return Folds(tuple(names), left_out, predicted)


def whole_group_folds(groups: Sequence[str], sources: Sequence[str]) -> Folds:
    """One fold per group. It leaves out every source with a run of the group, with all its runs.

    Args:
        groups: the framework, the device generation, the year or the kind of model of every run.
        sources: source of every run.
    """
    group = np.asarray(groups, str)
    source = np.asarray(sources, str)
    names = np.unique(group)

    # Other runs of the same source would tell of its site, which a stranger to the group does not
    # have.
    predicted = group == names[:, None]
    left_out = np.array([np.isin(source, source[group]) for group in predicted])
    # A group that every source has leaves nothing to learn from.
    learns = ~left_out.all(axis=1)
    return Folds(tuple(names[learns].tolist()), left_out[learns], predicted[learns])


def folds_of(labels: Mapping[str, np.ndarray]) -> dict[str, Folds]:
    """Folds by kind of group, from the labels of `SiteRuns.labels`."""
    sources = labels["source"].tolist()
    folds_by_kind = {
        kind: whole_group_folds(labels[kind].tolist(), sources) for kind in WHOLE_GROUPS
    }
    return {kind: folds for kind, folds in folds_by_kind.items() if folds.names}
