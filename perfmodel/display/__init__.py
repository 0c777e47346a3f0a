"""How results look: colours of events, HTML tables, the interactive timeline, progress. Knows plain values only."""

from perfmodel.display._html import folded, frame_html, paragraph
from perfmodel.display._json import json_text
from perfmodel.display._page import MemoryLine, calibration_page, decision_page, inline_frame, timeline_page
from perfmodel.display._palette import (
    BLUE,
    EVENTS,
    GREY,
    LINES,
    PARTS,
    VERMILLION,
    Look,
    ramp,
    require_matplotlib,
    require_picture,
    shade,
    text_colour,
)
from perfmodel.display._progress import Report, progress, shows_progress
from perfmodel.display._repr import short_repr, shorten_reprs
from perfmodel.display._results import prediction_html, search_html, whatif_html

shorten_reprs(__name__)
