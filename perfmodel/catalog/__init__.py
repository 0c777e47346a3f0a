"""Devices, clusters, models and training frameworks by name, each number with its source. No JAX."""

from perfmodel.catalog._clusters import NetworkEntry, cluster, clusters, with_network
from perfmodel.catalog._convnets import resnet, vgg16
from perfmodel.catalog._devices import device, devices, usable_cores
from perfmodel.catalog._frameworks import framework, framework_versions, frameworks
from perfmodel.catalog._models import from_config as model_from_config
from perfmodel.catalog._models import hub_names, model, model_from_toml, model_with, models
from perfmodel.catalog._network import NETWORK_WORDS, Network
from perfmodel.catalog._network_tokens import unread_link_words
from perfmodel.catalog._network_words import read_network
from perfmodel.catalog._problem import (
    FRAMEWORK_FACTS,
    JOB_FILE_KEYS,
    JOB_WORDS,
    LAYOUT_WORDS,
    PROBLEM_WORDS,
    JobFile,
    StatedLayout,
    framework_with,
    is_job_file,
    job_from_toml,
    layout_in_words,
    problem,
    problem_and_layout,
    read_job,
    toml_value,
    unfiled,
)
from perfmodel.catalog._recipes import (
    ExchangeLibrary,
    ExchangeRates,
    exchange_library,
    plain_fp8,
    recipe,
)
from perfmodel.catalog._toml import checked, checked_fields
from perfmodel.catalog._words import (
    ADAPTERS_NOT_STATED,
    DEVICES_PER_NODE,
    NVL72_DEVICES,
    REFERENCE_NETWORK,
    cluster_for,
    devices_of_adapters,
    stated_network,
)
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
