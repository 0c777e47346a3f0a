"""Predictions held against measurements."""

from perfmodel.validation._cases import validate_cases as validate_cases
