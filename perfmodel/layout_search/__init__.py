"""Layout search."""

from perfmodel.layout_search._search import METHODS as METHODS
from perfmodel.layout_search._search import Progress as Progress
from perfmodel.layout_search._search import SearchResult as SearchResult
from perfmodel.layout_search._search import search as search
from perfmodel.layout_search._space import Space as Space
from perfmodel.layout_search._space import default_space as default_space
from perfmodel.layout_search._space import enumerate_layouts as enumerate_layouts
from perfmodel.layout_search._space import restrict as restrict
from perfmodel.layout_search._space import with_schedules as with_schedules
