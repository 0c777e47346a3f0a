"""Pictures and traces of predictions."""

from perfmodel.viz._gantt import gantt as gantt
from perfmodel.viz._gantt import write_gantt as write_gantt
from perfmodel.viz._trace import trace_events as trace_events
from perfmodel.viz._trace import write_trace as write_trace
