"""Predicts inference servers: prefill and decode with a key-value cache."""

from perfmodel.display import shorten_reprs
from perfmodel.serving._engines import engine_commands, folded
from perfmodel.serving._request import (
    SERVING_KEYS,
    Requests,
    ServingKeywords,
    ServingOptions,
    server_layout,
    serving_options,
)
from perfmodel.serving._server import PARTS, Cost, ServingMemory
from perfmodel.serving._serving import Serving, serve
from perfmodel.serving._start import StartingPoint, starting_point
from perfmodel.serving._sweep import ServingSweep, serve_sweep

shorten_reprs(__name__)
