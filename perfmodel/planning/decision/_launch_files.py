"""Launch files of one layout for the frameworks that could run it."""

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import FORMATS, export_launch
from perfmodel.spec import Layout, Problem


def launch_files(problem: Problem, layout: Layout) -> list[dict[str, str]]:
    """`name` of every format with its `text`, or `why` it cannot run the layout; of the problem's framework alone where
    it has a format of its own."""
    name = problem.framework.name
    own = [form for form in FORMATS if name in (form.name, *form.frameworks)]
    found = []
    for form in own or FORMATS:
        asked = problem.framework.label if own else form.frameworks[0]
        try:
            text = export_launch(
                layout,
                asked,
                model=problem.model,
                job=problem.job,
                devices_per_node=problem.cluster.devices_per_node,
            )
            found.append({"name": form.name, "text": text})
        except LaunchFileError as error:
            found.append({"name": form.name, "why": str(error).removeprefix(f"{form.name} cannot run {layout}: ")})
    return sorted(found, key=lambda one: "why" in one)
