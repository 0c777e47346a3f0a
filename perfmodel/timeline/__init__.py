from perfmodel.timeline._compile import compile_structure as compile_structure
from perfmodel.timeline._makespan import makespan as makespan, makespan_and_grad as makespan_and_grad
from perfmodel.timeline._lanes import (
    makespan_lanes as makespan_lanes,
    makespan_lanes_and_grad as makespan_lanes_and_grad,
)
