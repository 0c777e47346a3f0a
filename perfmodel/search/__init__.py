"""Layout search."""

from perfmodel.search._search import METHODS as METHODS
from perfmodel.search._search import Progress as Progress
from perfmodel.search._search import SearchResult as SearchResult
from perfmodel.search._search import search as search
from perfmodel.search._space import Space as Space
from perfmodel.search._space import default_space as default_space
from perfmodel.search._space import enumerate_layouts as enumerate_layouts
from perfmodel.search._space import restrict as restrict
