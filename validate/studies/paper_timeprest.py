"""The results section of TiMePReSt's page."""

from pathlib import Path

from studies.schedule_tables import version_table, vgg_table
from studies.search_report import markdown_table


def timeprest_page(_folder: Path) -> str:
    """All tables."""
    return f"## Results\n\n{_versions()}\n\n### VGG-16 on two machines\n\n{markdown_table(vgg_table())}"


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
