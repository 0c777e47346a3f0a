"""Display of results: colours, HTML tables, the interactive timeline, progress bars."""

from perfmodel.display._console import (
    new_console,
    printed_text,
    say,
    say_verbatim,
    with_hanging_indent,
)
from perfmodel.display._health_page import health_html, health_page
from perfmodel.display._html import (
    folded,
    frame_html,
    paragraph,
    prediction_html,
    search_html,
    whatif_html,
)
from perfmodel.display._page import calibration_page, decision_page, inline_frame, timeline_page
from perfmodel.display._palette import (
    BLUE,
    EVENTS,
    GREY,
    LINES,
    PARTS,
    VERMILLION,
    Look,
    part_looks,
    ramp,
    require_matplotlib,
    require_picture,
    shade,
    text_colour,
)
from perfmodel.display._plain import PlainStream
from perfmodel.display._progress import Report, progress, shows_progress
from perfmodel.display._repr import json_text, short_repr, shorten_reprs
from perfmodel.display._table import WORD_HEADS, FittedTable, table

shorten_reprs(__name__)
