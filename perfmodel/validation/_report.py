"""Errors of predictions by group, as a dictionary that shows itself."""

from typing import Any

import pandas as pd

from perfmodel.display import folded, frame_html


class ValidationReport(dict[str, Any]):
    """What `validate_kernels` and `validate_cases` return: JSON values, the keys part of the command-line contract."""

    def to_frame(self) -> pd.DataFrame:
        """One row per op family and device, or per source of runs: its name, `n` and the errors as fractions."""
        if "families" in self:
            rows = [
                {"family": family, "device": device, **figures}
                for family, devices in self["families"].items()
                for device, figures in devices.items()
            ]
        else:
            groups = {**self["sources"], "all": self["all"]}
            rows = [
                {"source": name, **{k: v for k, v in figures.items() if k != "memory"}}
                | {f"memory_{k}": v for k, v in figures["memory"].items()}
                for name, figures in groups.items()
            ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        groups = self["families"] if "families" in self else self["sources"]
        return f"{type(self).__name__}(n={self['all']['n']:,}, groups={len(groups)}, skipped={self.skipped:,})"

    @property
    def skipped(self) -> int:
        """Rows that were not compared."""
        return sum(self["skipped"].values())

    def _repr_html_(self) -> str:
        skipped = pd.DataFrame({"why": list(self["skipped"]), "rows": list(self["skipped"].values())})
        return frame_html(self.to_frame()) + (folded("skipped", frame_html(skipped)) if len(skipped) else "")
