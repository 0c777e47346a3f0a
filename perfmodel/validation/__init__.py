"""Predictions held against measurements."""

from perfmodel.validation._cases import validate_cases as validate_cases
from perfmodel.validation._kernels import validate_kernels as validate_kernels
from perfmodel.validation._runs import read_runs as read_runs
from perfmodel.validation._schedule_tables import bubble_table as bubble_table
from perfmodel.validation._schedule_tables import memory_table as memory_table
from perfmodel.validation._schedule_tables import version_table as version_table
from perfmodel.validation._schedule_tables import vgg_table as vgg_table
from perfmodel.validation._schedule_tables import zero_bubble_table as zero_bubble_table
