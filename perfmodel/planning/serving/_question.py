"""What is asked of a server: a model on a cluster, and its requests in words, or a job file that says them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from perfmodel import catalog
from perfmodel.catalog import JobFile
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.cost.learn import weight_files
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.serving._request import NEEDED, Requests, ServingWords, serving_words
from perfmodel.planning.serving._server import Server
from perfmodel.spec import Cluster, Framework, Layout, Model, Transformer


@dataclass(frozen=True)
class ServingQuestion:
    """A model on a cluster, and what of it is served."""

    model: Model
    cluster: Cluster
    layout: str
    """What a job file says of it; empty without one."""
    words: ServingWords
    framework: Framework
    calibration: Path | str | None

    def server(self, layout: Layout, batch: int) -> Server:
        """A server with so many requests in flight over all replicas, checked.

        Raises:
            LayoutError: a layout that cannot serve the model.
            PerfModelError: a model that generates nothing, or requests that cannot be.
        """
        requests = self.words.requests(self.cluster, batch)
        model = _servable(self.model, self.cluster, layout, requests)
        calibration = self.calibration
        weights = weight_files(Path(calibration) if isinstance(calibration, str) else calibration)
        return Server(
            model=model, cluster=self.cluster, layout=layout, requests=requests, framework=self.framework,
            kernels=KernelModel.of(weights), collectives=CollectiveModel.of(weights),
        )  # fmt: skip


def serving_question(
    model: Model | JobFile | str, cluster: Cluster | str | None, words: Mapping[str, Any], *,
    calibration: Path | str | None, framework: Framework | None,
) -> ServingQuestion:  # fmt: skip
    """What `serve` is asked; words go before those of a job file, and those that are None or empty are not said.

    Raises:
        UnknownNameError: a name that no catalog has, a word that there is not.
        PerfModelError: no cluster.
    """
    said, layout = {word: value for word, value in words.items() if value not in (None, "")}, ""
    known = {one.name for one in fields(ServingWords)}
    if unknown := next((word for word in said if word not in known), None):
        raise UnknownNameError("word of a server", unknown, known)
    named: Any = model
    if (file := catalog.unfiled(model)) is not None:
        said = serving_words(file) | {word: file.words[word] for word in ("dtype",) if word in file.words} | said
        named, cluster, layout = file.words.get("model", ""), cluster or file.words.get("cluster"), file.layout
    if cluster is None:
        raise PerfModelError(NEEDED)
    asked = ServingWords(**said)
    return ServingQuestion(
        model=catalog.model(named) if isinstance(named, str) else named,
        cluster=catalog.cluster(cluster) if isinstance(cluster, str) else cluster,
        layout=layout,
        words=asked,
        framework=framework or Framework(step_overhead_s=asked.step_overhead_s),
        calibration=calibration,
    )


def _servable(model: Model, cluster: Cluster, layout: Layout, requests: Requests) -> Transformer:
    """The model, if it can be served so."""
    if not isinstance(model, Transformer) or model.decoder_layers or not model.causal:
        raise PerfModelError(f"serve: {model.name} generates no text; give a decoder-only transformer")
    longest = max(model.seq_len, model.longest_seq_len)
    if model.positions == "learned" and requests.tokens > longest:
        raise PerfModelError(
            f"serve: prompt and output are {requests.tokens:,} tokens; {model.name} has positions for {longest:,}"
        )
    used = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "ep", "etp", "order", "partition")}
    if layout != Layout(**used):
        raise LayoutError(f"serve: servers are laid out by tp, pp, dp, ep and etp; leave the rest out of {layout}")
    if requests.batch % layout.dp:
        nearest = max(1, round(requests.batch / layout.dp)) * layout.dp
        raise LayoutError(
            f"serve: batch {requests.batch} is not a multiple of dp={layout.dp}; the nearest is {nearest}"
        )
    if layout.pp > model.layers:
        raise LayoutError(f"{model.name} has {model.layers} layers; {layout.pp} pipeline stages are too many")
    cluster.require(layout.devices, f"layout {layout}")
    cluster.device.require(requests.dtype)
    return model
