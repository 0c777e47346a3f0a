"""Predicts runs with open settings as a mixture over all plausible choices.

Beside this door are `priors` (how people run) and `mixture` (weights and quantiles of log-normal
step times).
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.validation.unstated._choice import Chain
    from perfmodel.validation.unstated._completions import (
        FRAMEWORK_CHAIN,
        GENERIC,
        VERSION,
        completions,
    )
    from perfmodel.validation.unstated._described_run import JobRun, RowRun, described_job
    from perfmodel.validation.unstated._encoder_choices import real_tokens
    from perfmodel.validation.unstated._features import case_features, model_features
    from perfmodel.validation.unstated._open_cells import (
        ACCUMULATION,
        ACCUMULATION_CHAIN,
        CHUNKS_CHAIN,
        DEGREE_CHAIN,
        DTYPE_CHAIN,
        IN_PARTS,
        MICRO_BATCH_CHAIN,
        PARALLELISM,
        PARALLELISM_CHAIN,
        WHOLE_SHARE,
        chunks_of,
        filled_rows,
        nearest_power_of_two,
        parallelism_of,
        stated_degrees,
    )
    from perfmodel.validation.unstated._open_choices import (
        CONVERSATION_TOKENS,
        OPEN_CHOICES,
        DataParallelOverlap,
    )
    from perfmodel.validation.unstated._run_mixture import (
        RunPrediction,
        log_likelihoods,
        name_open_choices,
        predict_run,
    )

__getattr__, __dir__ = lazy_names(__name__)
