"""Logs of training runs: step times, throughput, memory, skipped steps, stalls, and the settings
that really ran."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.logs._log import (
    LOG_FORMATS,
    ClockRange,
    LogEvent,
    LoggedStep,
    PhaseTimer,
    TrainingLog,
)
from perfmodel.ingest.logs._read import parse_log, read_log

shorten_reprs(__name__)
