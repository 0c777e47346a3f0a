"""First on the path of a script that `perfmodel emulate` runs: prepares torch.distributed."""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

_MODULE = "torch.distributed.distributed_c10d"


# torch must not be imported here, which would take seconds in every Python process of the script.
# Its module is prepared when the script itself imports it.
class _Prepared(Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        from perfmodel.emulate.rank import install

        install(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != _MODULE:
            return None
        # The ordinary finder finds the module; only its loader is wrapped.
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Prepared(spec.loader)
        return spec


def _run_hidden():
    """The sitecustomize of the environment, which this one hides."""
    # Python imports the first `sitecustomize` on the path, so that of the environment would not
    # run.
    here = os.path.dirname(os.path.abspath(__file__))
    path_before = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        spec = find_spec("sitecustomize")
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(module_from_spec(spec))
    finally:
        sys.path[:] = path_before
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if "PERFMODEL_EMULATION" in os.environ:
    from perfmodel.processes import end_with_parent

    # A rank ends with the command that started it, even where that is killed.
    end_with_parent()
    sys.meta_path.insert(0, _Finder())
_run_hidden()
