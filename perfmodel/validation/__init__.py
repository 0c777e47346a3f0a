"""Predictions held against measurements."""

from perfmodel.validation._cases import validate_cases as validate_cases
from perfmodel.validation._kernels import validate_kernels as validate_kernels
