"""Reads networks described in words, as in papers and tables, and clusters with such networks.

A sentence names links and adapters ("8x 400 Gb/s InfiniBand per node"). What it leaves open comes
from the device's reference system, and is said to be assumed.
"""

from perfmodel.catalog.networks._clusters import (
    ADAPTERS_NOT_STATED,
    DEVICES_PER_NODE,
    NVL72_DEVICES,
    REFERENCE_NETWORK,
    cluster_for,
    devices_of_adapters,
    network_level,
    stated_network,
)
from perfmodel.catalog.networks._network import NETWORK_WORDS, Network
from perfmodel.catalog.networks._tokens import unread_link_words
from perfmodel.catalog.networks._words import read_network
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
