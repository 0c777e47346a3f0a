"""Devices, clusters, models and training frameworks by name, each number with its source. No JAX."""

from perfmodel.catalog._clusters import cluster as cluster
from perfmodel.catalog._clusters import clusters as clusters
from perfmodel.catalog._devices import device as device
from perfmodel.catalog._devices import devices as devices
from perfmodel.catalog._frameworks import framework as framework
from perfmodel.catalog._frameworks import framework_versions as framework_versions
from perfmodel.catalog._frameworks import frameworks as frameworks
from perfmodel.catalog._job_file import JOB_FILE_KEYS as JOB_FILE_KEYS
from perfmodel.catalog._job_file import JOB_WORDS as JOB_WORDS
from perfmodel.catalog._job_file import JobFile as JobFile
from perfmodel.catalog._job_file import is_job_file as is_job_file
from perfmodel.catalog._job_file import read_job as read_job
from perfmodel.catalog._models import model as model
from perfmodel.catalog._models import models as models
from perfmodel.catalog._problem import PROBLEM_WORDS as PROBLEM_WORDS
from perfmodel.catalog._problem import problem as problem
from perfmodel.catalog._problem import problem_and_layout as problem_and_layout
from perfmodel.catalog._problem import unfiled as unfiled
from perfmodel.catalog._recipes import plain_fp8 as plain_fp8
from perfmodel.catalog._recipes import recipe as recipe
from perfmodel.catalog._toml import checked as checked
from perfmodel.catalog._toml import checked_fields as checked_fields
from perfmodel.catalog._words import DEVICES_PER_NODE as DEVICES_PER_NODE
from perfmodel.catalog._words import NVL72_DEVICES as NVL72_DEVICES
from perfmodel.catalog._words import cluster_for as cluster_for
from perfmodel.catalog._words import compute_network as compute_network
from perfmodel.catalog._words import states_rate as states_rate
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
