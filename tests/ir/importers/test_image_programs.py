"""Vision models as programs: a ResNet from `torch.export` and from ONNX, its numbers, gradients and
distribution."""

import numpy as np
import pytest

from perfmodel.catalog import cluster
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir import Program
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import (
    cluster_timer,
    execute,
    program_structure,
    random_inputs,
    simulate,
)
from perfmodel.ir.importers import onnx_program, torch_program
from perfmodel.ir.models import training_step

SAMPLES, CHANNELS, SIZE, CLASSES = 4, 4, 8, 4


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


@pytest.fixture(scope="module")
def resnet(torch):
    """Stem with pooling, two stacks of a block each, the second with a projection, mean,
    classifier; in evaluation."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, n_in, n_out, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(n_out)
            self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(n_out)
            self.relu = nn.ReLU(inplace=True)
            self.down = None
            if stride > 1:
                self.down = nn.Sequential(
                    nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
                )

        def forward(self, x):
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            y += x if self.down is None else self.down(x)
            return self.relu(y)

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(2, CHANNELS, 3, 1, 1)
            self.bn1 = nn.BatchNorm2d(CHANNELS)
            self.pool = nn.MaxPool2d(3, 2, 1)
            self.layer1 = nn.Sequential(Block(CHANNELS, CHANNELS, 1))
            self.layer2 = nn.Sequential(Block(CHANNELS, 2 * CHANNELS, 2))
            self.mean = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Linear(2 * CHANNELS, CLASSES)

        def forward(self, x):
            x = self.pool(torch.relu(self.bn1(self.conv1(x))))
            return self.fc(torch.flatten(self.mean(self.layer2(self.layer1(x))), 1))

    torch.manual_seed(0)
    model = ResNet().double()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture(scope="module")
def image(torch):
    return torch.randn(SAMPLES, 2, SIZE, SIZE, dtype=torch.float64)


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def test_resnet_of_torch_computes_what_torch_does_and_distributes(torch, resnet, image):
    program = torch_program(resnet, (image,))
    with torch.no_grad():
        expected = resnet(image).numpy()
    arrays = {**weights_of(resnet), "x": image.numpy()}
    (found,) = execute(program, arrays).values()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    # stacks follow one another, so that stages can be cut between them
    layer = {i.outputs[0]: i.tag.layer for i in program.function.instructions if i.op == "conv2d"}
    assert list(layer.values()) == sorted(layer.values())
    assert len(set(layer.values())) == 2
    for degrees in (Degrees(data=2), Degrees(data=2, pipeline=2, micro_batches=2)):
        (spread,) = execute(distribute(program, degrees), arrays).values()
        np.testing.assert_allclose(spread, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_gradients_of_a_resnet_are_torch_s_and_replicas_sum_them(torch, resnet, image):
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = resnet

        def forward(self, x, labels):
            return torch.nn.functional.cross_entropy(self.model(x), labels)

    labels = torch.arange(SAMPLES) % CLASSES
    step = training_step(torch_program(Step(), (image, labels)))
    resnet.zero_grad()
    loss = Step()(image, labels)
    loss.backward()
    arrays = {f"model.{name}": w for name, w in weights_of(resnet).items()}
    arrays |= {"x": image.numpy(), "labels": labels.numpy()}
    wanted = {f"d_model.{name}": p.grad.numpy() for name, p in resnet.named_parameters()}
    spread = distribute(step, Degrees(data=2))
    for program in (step, spread):
        found = execute(program, arrays)
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
        for name, gradient in wanted.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-7, atol=1e-10)
    # half of the work each, and the gradients to sum
    v100 = cluster("dgx-2")
    timeline = simulate(program_structure(spread.function, v100), cluster_timer(v100))
    assert 0 < timeline.makespan_s < 1
    assert {i.op for i in spread.function.instructions if "all" in i.op} == {"all_reduce"}


def test_training_batch_norm_is_synchronised_by_replicas_and_refused_for_micro_batches(torch):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4)).double().train()
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    program = torch_program(model, (x,))
    arrays = {**weights_of(model), "input": x.numpy()}
    expected = model(x).detach().numpy()
    for degrees in (Degrees(), Degrees(data=2)):
        (found,) = execute(distribute(program, degrees), arrays).values()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)
    with pytest.raises(LayoutError, match="mixes samples of the batch"):
        distribute(program, Degrees(micro_batches=2))


@pytest.mark.parametrize(
    "layer",
    [
        "GroupNorm(2, 4)",
        "InstanceNorm2d(4, affine=True)",
        "AvgPool2d(2, 2, 1)",
        "AdaptiveAvgPool2d(2)",
        "MaxPool2d(2)",
        "Conv2d(4, 4, 3, groups=2)",
    ],
)
def test_layers_of_vision_models_compute_what_torch_does(torch, layer):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 1), eval(f"torch.nn.{layer}", {"torch": torch})
    ).double()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    (found,) = execute(
        torch_program(model, (x,)), {**weights_of(model), "input": x.numpy()}
    ).values()
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-9, atol=1e-12)


def test_what_convolutions_cannot_do_is_named(torch):
    x = torch.randn(2, 4, 6, 6)
    for model, why in (
        (torch.nn.Conv2d(4, 4, 3, dilation=2), "dilated windows"),
        (torch.nn.AdaptiveAvgPool2d(4), "windows of different sizes"),
        (torch.nn.Conv2d(4, 4, 2, padding="same"), "padding"),
    ):
        with pytest.raises(PerfModelError, match=why):
            torch_program(model, (x,))


def onnx_resnet(onnx):
    """A residual block of ONNX: Conv, BatchNormalization, MaxPool, Add, GlobalAveragePool, Flatten,
    Gemm."""
    h, rng = onnx.helper, np.random.default_rng(0)
    tensors, nodes = [], []

    def weight(name, *shape):
        array = rng.uniform(0.5, 1.5, shape).astype(np.float32) / 4
        tensors.append(onnx.numpy_helper.from_array(array, name))
        return name

    def op(kind, *inputs, **attributes):
        name = f"v{len(nodes)}"
        nodes.append(h.make_node(kind, inputs, [name], **attributes))
        return name

    def normed(x, name, n):
        return op(
            "BatchNormalization",
            x,
            *(weight(f"{name}.{part}", n) for part in ("gain", "shift", "mean", "var")),
        )

    x = normed(
        op("Conv", "x", weight("conv1", CHANNELS, 2, 3, 3), pads=[1] * 4, strides=[1, 1]),
        "bn1",
        CHANNELS,
    )
    x = op("MaxPool", op("Relu", x), kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    y = op(
        "Conv",
        x,
        weight("conv2", CHANNELS, CHANNELS, 3, 3),
        weight("conv2.bias", CHANNELS),
        pads=[1] * 4,
    )
    x = op("Relu", op("Add", normed(y, "bn2", CHANNELS), x))
    x = op(
        "Flatten",
        op("GlobalAveragePool", op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])),
    )
    op("Gemm", x, weight("fc", CLASSES, CHANNELS), weight("fc.bias", CLASSES), transB=1)
    value = h.make_tensor_value_info("x", 1, ["batch", 2, SIZE, SIZE])
    graph = h.make_graph(
        nodes, "resnet", [value], [h.make_tensor_value_info(nodes[-1].output[0], 1, None)], tensors
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 15)])


def test_resnet_of_onnx_computes_what_onnx_s_reference_does():
    onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra: onnx)")
    from onnx.reference import ReferenceEvaluator

    model = onnx_resnet(onnx)
    program: Program = onnx_program(model, dims={"batch": SAMPLES})
    x = np.random.default_rng(1).standard_normal((SAMPLES, 2, SIZE, SIZE)).astype(np.float32)
    expected = np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])
    names = {w.name for w in program.inputs_of("parameter")}
    assert not [name for name in names if name.endswith((".mean", ".var"))]
    arrays = {
        t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in names
    } | {"x": x}
    for degrees in (Degrees(), Degrees(data=2), Degrees(tensor=2)):
        (found,) = execute(distribute(program, degrees), arrays).values()
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert random_inputs(program)["x"].shape == x.shape
