"""Pictures and traces of predictions."""

from perfmodel.viz._comparison import draw_comparison as draw_comparison
from perfmodel.viz._comparison import write_comparison as write_comparison
from perfmodel.viz._curve import draw_curve as draw_curve
from perfmodel.viz._curve import write_curve as write_curve
from perfmodel.viz._gantt import gantt as gantt
from perfmodel.viz._gantt import write_gantt as write_gantt
from perfmodel.viz._schedules import draw_schedules as draw_schedules
from perfmodel.viz._schedules import draw_training_curves as draw_training_curves
from perfmodel.viz._schedules import write_schedules as write_schedules
from perfmodel.viz._schedules import write_training_curves as write_training_curves
from perfmodel.viz._trace import trace_events as trace_events
from perfmodel.viz._trace import write_trace as write_trace
