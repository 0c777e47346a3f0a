"""The catalog of devices, clusters, models and training frameworks; each figure has its source.

Beside this door are:

- `job_files`: problems by words, or from one TOML file;
- `networks`: networks in words, and clusters that are described by them;
- `huggingface`: configurations of Hugging Face as models;
- `this_machine`: the machine at hand as a device;
- `entries`, `plausible`: entries of TOML files, and limits beyond which a figure is a slip.
"""

from perfmodel.catalog._clusters import (
    ClusterEntry,
    KindEntry,
    LevelEntry,
    LinkEntry,
    NetworkEntry,
    cluster,
    clusters,
    with_network,
)
from perfmodel.catalog._conv_nets import resnet, vgg16
from perfmodel.catalog._devices import DeviceEntry, device, devices
from perfmodel.catalog._frameworks import framework, framework_versions, framework_years, frameworks
from perfmodel.catalog._models import (
    every_model,
    hub_names,
    model,
    model_from_toml,
    model_with,
    models,
)
from perfmodel.catalog._models import from_config as model_from_config
from perfmodel.catalog._recipes import (
    ExchangeLibrary,
    ExchangeRates,
    exchange_library,
    plain_fp8,
    recipe,
)
from perfmodel.catalog.entries import checked, checked_fields
from perfmodel.catalog.job_files import StatedLayout, problem, problem_and_layout, unfiled
from perfmodel.catalog.networks import cluster_for, read_network
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
