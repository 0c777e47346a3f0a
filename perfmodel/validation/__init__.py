"""Predictions held against measurements."""

from perfmodel.validation._cases import validate_cases as validate_cases
from perfmodel.validation._kernels import validate_kernels as validate_kernels
from perfmodel.validation._schedule_tables import bubble_table as bubble_table
from perfmodel.validation._schedule_tables import memory_table as memory_table
from perfmodel.validation._schedule_tables import version_table as version_table
from perfmodel.validation._schedule_tables import vgg_table as vgg_table
from perfmodel.validation._schedule_tables import zero_bubble_table as zero_bubble_table
from perfmodel.validation._selection_report import selection_report as selection_report
from perfmodel.validation._selection_study import study as selection_study
from perfmodel.validation._selection_tables import PREFILL_DEVICES as PREFILL_DEVICES
from perfmodel.validation._selection_tables import PREFILL_MODELS as PREFILL_MODELS
from perfmodel.validation._selection_tables import TRAINING_DEVICES as TRAINING_DEVICES
from perfmodel.validation._selection_tables import TRAINING_WIDTHS as TRAINING_WIDTHS
from perfmodel.validation._selection_tables import prefill_case as prefill_case
from perfmodel.validation._selection_tables import training_case as training_case
