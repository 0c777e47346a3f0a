"""Devices, clusters and models by name, each number with its source. No JAX."""

from perfmodel.catalog._clusters import cluster as cluster
from perfmodel.catalog._clusters import clusters as clusters
from perfmodel.catalog._devices import device as device
from perfmodel.catalog._devices import devices as devices
from perfmodel.catalog._models import model as model
from perfmodel.catalog._models import models as models
from perfmodel.catalog._words import cluster_for as cluster_for
