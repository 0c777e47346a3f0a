"""How results look: colours of events, HTML tables, the interactive timeline, progress. Knows plain values only."""

from perfmodel.display._html import folded as folded
from perfmodel.display._html import frame_html as frame_html
from perfmodel.display._html import paragraph as paragraph
from perfmodel.display._json import json_text as json_text
from perfmodel.display._page import MemoryLine as MemoryLine
from perfmodel.display._page import calibration_page as calibration_page
from perfmodel.display._page import decision_page as decision_page
from perfmodel.display._page import inline_frame as inline_frame
from perfmodel.display._page import timeline_page as timeline_page
from perfmodel.display._palette import BLUE as BLUE
from perfmodel.display._palette import EVENTS as EVENTS
from perfmodel.display._palette import GREY as GREY
from perfmodel.display._palette import LINES as LINES
from perfmodel.display._palette import PARTS as PARTS
from perfmodel.display._palette import VERMILLION as VERMILLION
from perfmodel.display._palette import Look as Look
from perfmodel.display._palette import ramp as ramp
from perfmodel.display._palette import require_matplotlib as require_matplotlib
from perfmodel.display._palette import require_picture as require_picture
from perfmodel.display._palette import shade as shade
from perfmodel.display._palette import text_colour as text_colour
from perfmodel.display._progress import Report as Report
from perfmodel.display._progress import progress as progress
from perfmodel.display._progress import shows_progress as shows_progress
from perfmodel.display._repr import short_repr as short_repr
from perfmodel.display._repr import shorten_reprs as shorten_reprs
from perfmodel.display._results import prediction_html as prediction_html
from perfmodel.display._results import search_html as search_html
from perfmodel.display._results import whatif_html as whatif_html

shorten_reprs(__name__)
