"""Pictures and traces of predictions."""

from perfmodel.display import shorten_reprs
from perfmodel.viz._breakdown import draw_breakdown as draw_breakdown
from perfmodel.viz._comparison import draw_comparison as draw_comparison
from perfmodel.viz._curve import draw_curves as draw_curves
from perfmodel.viz._curve import draw_emulated_curve as draw_emulated_curve
from perfmodel.viz._gantt import gantt as gantt
from perfmodel.viz._gantt import write_gantt as write_gantt
from perfmodel.viz._over_time import draw_link_utilisation as draw_link_utilisation
from perfmodel.viz._over_time import draw_memory as draw_memory
from perfmodel.viz._pareto import draw_pareto as draw_pareto
from perfmodel.viz._pareto import non_dominated as non_dominated
from perfmodel.viz._parity import draw_parity as draw_parity
from perfmodel.viz._roofline import draw_roofline as draw_roofline
from perfmodel.viz._schedules import draw_bubble_curves as draw_bubble_curves
from perfmodel.viz._schedules import draw_schedules as draw_schedules
from perfmodel.viz._schedules import draw_training_curves as draw_training_curves
from perfmodel.viz._style import save_figure as save_figure
from perfmodel.viz._trace import interactive as interactive
from perfmodel.viz._trace import trace_events as trace_events
from perfmodel.viz._trace import write_interactive as write_interactive
from perfmodel.viz._trace import write_trace as write_trace

shorten_reprs(__name__)
