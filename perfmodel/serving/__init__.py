"""Serving-side inference: prefill and decode with a cache of keys and values."""

from perfmodel.display import shorten_reprs
from perfmodel.serving._memory import ServingMemory as ServingMemory
from perfmodel.serving._request import WEIGHT_BYTES as WEIGHT_BYTES
from perfmodel.serving._request import Requests as Requests
from perfmodel.serving._request import ServingWords as ServingWords
from perfmodel.serving._request import serving_words as serving_words
from perfmodel.serving._serving import Limits as Limits
from perfmodel.serving._serving import Serving as Serving
from perfmodel.serving._serving import serve as serve
from perfmodel.serving._sweep import ServingSweep as ServingSweep
from perfmodel.serving._sweep import serve_sweep as serve_sweep

shorten_reprs(__name__)
