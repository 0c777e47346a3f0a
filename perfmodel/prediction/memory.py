"""Memory of a step by category, whether it fits, and the size of a checkpoint."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction._fits import (
    FRAGMENTATION,
    bundle_memory,
    fit_probabilities,
    fitting,
    fullness,
    needed_memory,
    peak_memory,
    rank_checkpoint_bytes,
    rank_devices,
    version_difference,
    workspace_bytes,
)
from perfmodel.prediction._memory import CATEGORIES, gathered_params
from perfmodel.prediction._memory_inputs import communicators
from perfmodel.prediction._prediction import StageMemory
from perfmodel.prediction._zero import checkpoint_bytes

shorten_reprs(__name__)
