"""Public architectures as programs: read by three exporters, trained, distributed and run as the
original computes.

The whole list is the slow part; five of its kinds are in every run of the tests.
"""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_models import ARCHITECTURES, SORTED, Architecture, Made, make
from thinned import one_in

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.ir import Program
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute, run
from perfmodel.ir.importers import SourceSettings, onnx_program, read_program, torch_program
from perfmodel.ir.models import training_step
from perfmodel.ir.program_search import search_programs

pytestmark = pytest.mark.filterwarnings("ignore")
FAST = ("gpt2", "llama", "bert", "vit", "t5")
ALL_AT_ONCE = "dp=2,tp=2,pp=2,micro_batches=2,zero=1"
LAYOUTS = (
    "dp=2,zero=3",
    "tp=2,sequence_parallel=true",
    "pp=2,micro_batches=2,checkpoint=true",
    "dp=4",
)


def fast_ones(*fast: str) -> list[Any]:
    """All architectures, of which all but some are slow."""
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed (extra: zoo)")


@pytest.fixture(scope="module")
def transformers(torch: Any) -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed (extra: zoo)")


def made(torch: Any, transformers: Any, name: str, **options: Any) -> Made:
    return make(torch, transformers, ARCHITECTURES[name], **options)


def exported(torch: Any, model: Made) -> Any:
    return torch.export.export(model.module, (), model.inputs, strict=False)


def as_program(torch: Any, model: Made, name: str) -> Program:
    return torch_program(exported(torch, model), values=model.values, name=name)


def layouts(architecture: Architecture, texts: Sequence[str]) -> list[str]:
    """Those of some layouts that the architecture's layers can be cut for."""
    return [text.replace("pp=2,", "") if architecture.shared_layers else text for text in texts]


def require_gradients_of(model: Made, results: dict[str, np.ndarray]) -> None:
    """Loss and gradients are the original's, up to rounding."""
    model.module.zero_grad()
    loss = model.loss()
    loss.backward()
    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-5)
    for name, parameter in model.module.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.numpy()
        # Some gradients are zero but for rounding, as those of biases of keys.
        atol = 1e-3 * np.abs(gradient).max() + 1e-6
        np.testing.assert_allclose(
            results[f"d_{name}"], gradient, rtol=1e-3, atol=atol, err_msg=name
        )


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        *one_in(2, [(name, (ALL_AT_ONCE,)) for name in FAST]),
        *(
            pytest.param(
                name, (ALL_AT_ONCE, *LAYOUTS), id=f"{name}-everyhow", marks=pytest.mark.slow
            )
            for name in ARCHITECTURES
        ),
    ],
)
def test_it_trains_as_the_original(
    torch: Any, transformers: Any, name: str, texts: tuple[str, ...]
) -> None:
    model = made(torch, transformers, name)
    step = training_step(as_program(torch, model, name))
    arrays = model.arrays
    results = execute(step, arrays)
    loss = next(tensor.name for tensor in step.outputs if tensor.role == "loss")
    require_gradients_of(model, results | {"loss": results[loss]})
    for text in layouts(ARCHITECTURES[name], texts):
        distributed = execute(distribute(step, Degrees.parse(text)), arrays)
        for key, value in results.items():
            atol = 1e-3 * np.abs(value).max() + 1e-6
            np.testing.assert_allclose(
                distributed[key], value, rtol=1e-3, atol=atol, err_msg=f"{text}: {key}"
            )


@pytest.mark.parametrize(
    "name",
    [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.slow) for name in SORTED],
)
def test_mixtures_that_sort_their_tokens_train_as_the_original(
    torch: Any, transformers: Any, name: str
) -> None:
    """Each token takes the weights of its expert instead."""
    model = make(torch, transformers, SORTED[name])
    export = exported(torch, model)
    before = str(export.graph)
    assert "sort" in before
    step = training_step(torch_program(export, values=model.values, name=name))
    assert str(export.graph) == before
    results = execute(step, model.arrays)
    loss = next(tensor.name for tensor in step.outputs if tensor.role == "loss")
    require_gradients_of(model, results | {"loss": results[loss]})
    distributed = execute(distribute(step, Degrees.parse(ALL_AT_ONCE)), model.arrays)
    for key, value in results.items():
        atol = 1e-3 * np.abs(value).max() + 1e-6
        np.testing.assert_allclose(distributed[key], value, rtol=1e-3, atol=atol, err_msg=key)


def test_layers_that_are_one_fill_no_pipeline(torch: Any, transformers: Any) -> None:
    step = training_step(as_program(torch, made(torch, transformers, "albert"), "albert"))
    with pytest.raises(LayoutError, match="1 layers are too few for 2 pipeline stages"):
        distribute(step, Degrees(pipeline=2, micro_batches=2))


class LossAlone:
    """The module that returns nothing but the loss, as ONNX's exporters want it: called with what
    has names."""

    def __new__(cls, torch: Any, model: Made) -> Any:
        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model.module

            def forward(self, *tensors: Any) -> Any:
                return self.model(**dict(zip(model.inputs, tensors, strict=True))).loss

        return Module().eval()


def onnx_file(torch: Any, model: Made, *, dynamo: bool) -> Any:
    module, inputs = LossAlone(torch, model), tuple(model.inputs.values())
    buffer = io.BytesIO()
    options: dict[str, Any] = (
        {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
    )
    written = torch.onnx.export(
        module, inputs, None if dynamo else buffer, input_names=list(model.inputs), **options
    )
    import onnx

    return written.model_proto if dynamo else onnx.load_from_string(buffer.getvalue())


def weights_of(program: Program, graph: Any) -> dict[str, np.ndarray]:
    """Values of the file's tensors, under the names that the program has for them."""
    import onnx

    labels = {tensor.name for tensor in program.inputs}
    arrays = {}
    for tensor in graph.graph.initializer:
        label = "".join(
            letter if letter.isalnum() or letter in "_." else "_" for letter in tensor.name
        )
        if label in labels:
            arrays[label] = onnx.numpy_helper.to_array(tensor)
    return arrays


NOT_BY_TORCHSCRIPT = ("whisper",)
"""torch's older exporter cannot write `aten::diff`, by which packed sequences are told apart
without a mask."""
ONE_LAYER_BY_TORCHSCRIPT = ("resnet",)
"""Its files keep no names of the modules that repeat, so the whole network is one layer, which no
pipeline divides."""
NOT_BY_DYNAMO = ("t5", "swin")
"""torch's newer exporter fails to decompose them."""


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        ("gpt2", False),
        ("bert", True),
        *(
            pytest.param(name, dynamo, marks=pytest.mark.slow)
            for name in ARCHITECTURES
            for dynamo in (False, True)
            if (name, dynamo) not in (("gpt2", False), ("bert", True))
        ),
    ],
)
def test_onnx_computes_what_the_original_does(
    torch: Any, transformers: Any, name: str, dynamo: bool
) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (extra: zoo)")
    if name in (NOT_BY_DYNAMO if dynamo else NOT_BY_TORCHSCRIPT):
        pytest.skip("torch cannot export it to ONNX in this way")
    model = made(torch, transformers, name)
    graph = onnx_file(torch, model, dynamo=dynamo)
    program = onnx_program(graph, values=model.values, name=name)
    arrays = weights_of(program, graph) | {n: t.numpy() for n, t in model.inputs.items()}
    expected = model.loss().item()
    pipelined = dynamo or name not in ONE_LAYER_BY_TORCHSCRIPT
    distributed = (
        layouts(ARCHITECTURES[name], ("dp=2,tp=2,pp=2,micro_batches=2",)) if pipelined else ()
    )
    for text in ("dp=1", *distributed):
        (loss,) = execute(distribute(program, Degrees.parse(text)), arrays).values()
        np.testing.assert_allclose(loss, expected, rtol=1e-4, err_msg=text)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_saved_export_is_the_module(
    torch: Any, transformers: Any, name: str, tmp_path: Path
) -> None:
    model = made(torch, transformers, name)
    path = tmp_path / "model.pt2"
    torch.export.save(exported(torch, model), path)
    step = read_program(str(path), SourceSettings(values=model.values))
    of_the_module = training_step(as_program(torch, model, "model"))
    assert step.trains
    # A file keeps another order, and of a weight that two modules share another name.
    shapes = [Counter((w.shape, w.tensor_axis) for w in p.inputs) for p in (step, of_the_module)]
    ops = [Counter(i.op for i in p.function.instructions) for p in (step, of_the_module)]
    assert shapes[0] == shapes[1]
    assert ops[0] == ops[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["dp=2,zero=3", "tp=2,sequence_parallel=true", "dp=2,pp=2,micro_batches=2"]
)
@pytest.mark.parametrize("name", FAST)
def test_real_ranks_compute_what_the_original_does(
    torch: Any, transformers: Any, name: str, layout: str
) -> None:
    model = made(torch, transformers, name)
    program = distribute(training_step(as_program(torch, model, name)), Degrees.parse(layout))
    results = run(program, model.arrays, repeats=1).outputs
    loss = next(tensor.name for tensor in program.outputs if tensor.role == "loss")
    require_gradients_of(model, results | {"loss": results[loss]})


@pytest.mark.parametrize("name", fast_ones("llama"))
def test_it_is_searched(torch: Any, transformers: Any, name: str) -> None:
    step = training_step(as_program(torch, made(torch, transformers, name), name))
    search = search_programs(step, catalog.cluster("dgx-a100"), 4, micro_batches=(2, 4))
    assert search.candidates[0].samples_per_s > 0


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_mixed_precision_keeps_its_casts(torch: Any, transformers: Any, name: str) -> None:
    """Norms of bf16 models compute in fp32, and so does the loss."""
    model = made(torch, transformers, name, dtype=torch.bfloat16)
    program = as_program(torch, model, name)
    casts = [i for i in program.function.instructions if i.op == "cast"]
    assert casts
    arrays = {}
    for key, tensor in {**model.module.state_dict(), **model.inputs}.items():
        arrays[key] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    results = execute(program, arrays)
    loss = next(tensor.name for tensor in program.outputs if tensor.role == "loss")
    np.testing.assert_allclose(np.float32(results[loss]), model.loss().item(), rtol=2e-2)
