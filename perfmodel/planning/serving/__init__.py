"""Serving-side inference: prefill and decode with a cache of keys and values."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.serving._memory import ServingMemory as ServingMemory
from perfmodel.planning.serving._request import Requests as Requests
from perfmodel.planning.serving._request import ServingWords as ServingWords
from perfmodel.planning.serving._request import serving_words as serving_words
from perfmodel.planning.serving._serving import Limits as Limits
from perfmodel.planning.serving._serving import Serving as Serving
from perfmodel.planning.serving._serving import serve as serve
from perfmodel.planning.serving._sweep import ServingSweep as ServingSweep
from perfmodel.planning.serving._sweep import serve_sweep as serve_sweep

shorten_reprs(__name__)
