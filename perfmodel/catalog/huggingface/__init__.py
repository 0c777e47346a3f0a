"""Configurations of Hugging Face as models.

There is a class for each family of architectures, and a table that says which other architectures are read as which.
"""

from perfmodel.catalog.huggingface._families import FAMILIES
from perfmodel.catalog.huggingface._layers import listed_layers, one_number
from perfmodel.catalog.huggingface._parts import known_family, language_model
from perfmodel.catalog.huggingface._relatives import RELATIVES, Relative
from perfmodel.catalog.huggingface._unknown import unknown_model_type
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
