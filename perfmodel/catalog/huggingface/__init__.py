"""Configurations of Hugging Face as models.

There is a class for each family of architectures, and a table that says which other architectures
are read as which.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.catalog.huggingface._defaults import keys_read, with_class_defaults
    from perfmodel.catalog.huggingface._families import FAMILIES
    from perfmodel.catalog.huggingface._layers import listed_layers, one_number
    from perfmodel.catalog.huggingface._parts import (
        biases_not_counted,
        check_parts_are_of_family,
        further_modules,
        head_of_class,
        known_family,
        language_model,
    )
    from perfmodel.catalog.huggingface._relatives import RELATIVES, Relative
    from perfmodel.catalog.huggingface._unet import UNetConfig
    from perfmodel.catalog.huggingface._unknown import (
        CannotDescribeError,
        cannot_describe,
        unknown_model_type,
        with_toml,
    )

# The families take as long to import as the rest of the catalog, and most processes read no
# configuration.
__getattr__, __dir__ = lazy_names(__name__)
