"""Draws pictures and writes traces of predictions."""

from perfmodel.display import shorten_reprs
from perfmodel.viz._curve import draw_curves, draw_emulated_curve
from perfmodel.viz._gantt import gantt, write_gantt
from perfmodel.viz._layouts import draw_breakdown, draw_pareto, non_dominated
from perfmodel.viz._measured import draw_comparison, draw_parity, draw_roofline
from perfmodel.viz._schedules import draw_bubble_curves, draw_schedules, draw_training_curves
from perfmodel.viz._style import WIDTHS_IN, save_figure
from perfmodel.viz._trace import interactive, trace_events, write_interactive, write_trace
from perfmodel.viz.over_time import draw_link_utilisation, draw_memory

shorten_reprs(__name__)
