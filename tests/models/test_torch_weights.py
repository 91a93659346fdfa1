"""Weights of a PyTorch network written here, module by module named as torchvision names them."""

import json
import logging
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import linen as nn
from torch.nn import functional

from jaxdl import models
from jaxdl.config import ImageConfig, ImageDataConfig, OptimizerConfig, TrainConfig
from jaxdl.data.images.batches import ImageFeed
from jaxdl.data.images.sources import open_source
from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.models.torch_weights import load_torch_weights
from jaxdl.train.checkpoint import Checkpointer
from jaxdl.train.loop import train
from jaxdl.train.program import prepare
from jaxdl.train.task import Classification


class TorchBlock(torch.nn.Module):
    def __init__(self, channels, features, stride, bottleneck):
        super().__init__()
        # Kernel, output channels and stride of each convolution.
        layers = [(3, features, stride), (3, features, 1)]
        if bottleneck:
            layers = [(1, features, 1), (3, features, stride), (1, 4 * features, 1)]
        inputs = channels
        for number, (kernel, outputs, step) in enumerate(layers, 1):
            self.add_module(f"conv{number}", conv(inputs, outputs, kernel, step))
            self.add_module(f"bn{number}", torch.nn.BatchNorm2d(outputs))
            inputs = outputs
        self.depth = len(layers)
        self.downsample = None
        if stride != 1 or channels != inputs:
            self.downsample = torch.nn.Sequential(
                conv(channels, inputs, 1, stride), torch.nn.BatchNorm2d(inputs)
            )

    def forward(self, x):
        y = x
        for number in range(1, self.depth + 1):
            y = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(y))
            y = functional.relu(y) if number < self.depth else y
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(torch.nn.Module):
    def __init__(self, sizes, bottleneck, classes=1000, width=64):
        super().__init__()
        self.conv1 = conv(3, width, 7, 2)
        self.bn1 = torch.nn.BatchNorm2d(width)
        channels = width
        for stage, size in enumerate(sizes):
            features, blocks = width * 2**stage, []
            for i in range(size):
                blocks.append(TorchBlock(channels, features, 2 if stage and not i else 1, bottleneck))
                channels = features * (4 if bottleneck else 1)
            self.add_module(f"layer{stage + 1}", torch.nn.Sequential(*blocks))
        self.stages = len(sizes)
        self.fc = torch.nn.Linear(channels, classes)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def conv(inputs, outputs, kernel, stride):
    return torch.nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def randomized(network):
    """Gives every normalisation layer statistics and an affine map of its own, and switches to evaluation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.2, 1)
                module.bias.normal_(0, 0.2)
    return network.eval()


def write(state: dict[str, torch.Tensor], path: Path) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in state.items()})
    else:
        safetensors.torch.save_file(state, path)
    return path


def variables_of(model, size=64):
    x = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return nn.unbox(jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), x))


def tiny_model(classes=5, **kwargs):
    return models.ResNet((1, 1), True, classes, width=4, **kwargs)


@pytest.fixture(scope="module")
def tiny():
    """The state of a small PyTorch network."""
    return randomized(TorchResNet((1, 1), True, 5, width=4)).state_dict()


@pytest.mark.parametrize(
    ("name", "sizes", "bottleneck", "suffix"),
    [("resnet18", (2, 2, 2, 2), False, ".npz"), ("resnet50", (3, 4, 6, 3), True, ".safetensors")],
)
def test_the_network_computes_what_pytorch_computes(tmp_path, name, sizes, bottleneck, suffix):
    network = randomized(TorchResNet(sizes, bottleneck))
    path = write(network.state_dict(), tmp_path / f"weights{suffix}")
    model = models.build(name, num_classes=1000)
    shapes = variables_of(model)
    variables = load_torch_weights(path, shapes)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), variables) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == sum(
        parameter.numel() for parameter in network.parameters()
    )
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    logits = np.asarray(jax.jit(lambda v, x: model.apply(v, x, train=False))(variables, images))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_weights_take_the_dtypes_of_the_variables(tmp_path, tiny):
    halved = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tiny.items()}
    path = write(halved, tmp_path / "half.safetensors")
    loaded = load_torch_weights(path, variables_of(tiny_model(param_dtype=jnp.float16)))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded["params"])} == {np.dtype(np.float16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded["batch_stats"])} == {np.dtype(np.float32)}
    expected = halved["bn1.running_var"].float().numpy()
    np.testing.assert_array_equal(loaded["batch_stats"]["stem"]["norm"]["var"], expected)


def test_a_head_for_other_classes_is_left_as_it_was(tmp_path, tiny, caplog):
    path = write(tiny, tmp_path / "weights.npz")
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 7.0), variables_of(tiny_model(classes=3)))
    with caplog.at_level(logging.WARNING):
        loaded = load_torch_weights(path, variables)
    assert "5 classes apart and this model 3" in caplog.text
    assert loaded["params"]["head"]["kernel"] is variables["params"]["head"]["kernel"]
    assert loaded["params"]["head"]["bias"] is variables["params"]["head"]["bias"]
    np.testing.assert_array_equal(loaded["params"]["stem"]["norm"]["scale"], tiny["bn1.weight"].numpy())


def changed(**updates):
    def change(state):
        renamed = {name.replace("__", "."): value for name, value in updates.items()}
        return {name: value for name, value in (state | renamed).items() if value is not None}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(layer1__0__bn3__bias=None), r"1 missing \(layer1\.0\.bn3\.bias\)"),
        (changed(layer3__0__conv1__weight=torch.ones(1)), r"1 unknown \(layer3\.0\.conv1\.weight\)"),
        (changed(conv1__weight=torch.ones(4, 3, 3, 3)), r"conv1\.weight 4x3x3x3, in the model 4x3x7x7"),
        (changed(fc__weight=torch.ones(5, 9)), r"fc\.weight 5x9, in the model 5x32"),
        (changed(fc__weight=torch.ones(6, 32)), r"fc\.weight 6x32, in the model 5x32"),
        (changed(fc__weight=None, fc__bias=None), r"2 missing"),
        (lambda state: TorchResNet((1, 2, 1), False, 5, width=4).state_dict(), r"\.\.\..*model\.name"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_weights_of_another_architecture_are_refused(tmp_path, tiny, change, words, suffix):
    path = write(change(tiny), tmp_path / f"weights{suffix}")
    with pytest.raises(ConfigError, match=words):
        load_torch_weights(path, variables_of(tiny_model()))


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e6])
def test_values_that_are_not_finite_are_refused(tmp_path, tiny, value):
    spoilt = tiny["layer2.0.conv2.weight"].clone()
    spoilt[0, 0, 0, 0] = value
    path = write(tiny | {"layer2.0.conv2.weight": spoilt}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"not finite.*layer2\.0\.conv2\.weight"):
        load_torch_weights(path, variables_of(tiny_model(param_dtype=jnp.float16)))


def safetensors_file(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("name", ["weights.npz", "weights.safetensors", "weights.pth"])
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"no weights at all" * 10,
        safetensors_file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"torn"),
        safetensors_file({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, b"four"),
    ],
    ids=["absent", "empty", "text", "torn", "unknown dtype"],
)
def test_files_without_weights_are_refused(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_torch_weights(path, variables_of(tiny_model()))


def test_a_damaged_npz_file_is_refused(tmp_path, tiny):
    path = write(tiny, tmp_path / "weights.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_torch_weights(path, variables_of(tiny_model()))


@pytest.mark.parametrize("value", [np.ones(4, np.int32), np.array(["a"] * 4), np.array([{}], object)])
def test_arrays_that_are_no_weights_are_refused(tmp_path, tiny, value):
    path = tmp_path / "weights.npz"
    np.savez(path, **{name: tensor.numpy() for name, tensor in tiny.items()} | {"bn1.weight": value})
    with pytest.raises(CheckpointError, match=r"bn1\.weight|Object"):
        load_torch_weights(path, variables_of(tiny_model()))


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="directory"):
        load_torch_weights(tmp_path, variables_of(tiny_model()))


def test_a_run_starts_from_the_weights_with_a_fresh_head(tmp_path, tiny):
    """Parameters and averages, on eight devices; the rate is so small that the update changes nothing."""
    path = write(tiny, tmp_path / "weights.npz")
    config = ImageConfig(
        data=ImageDataConfig(image_size=8, batch_size=16, eval_batch_size=360, workers=0),
        optimizer=OptimizerConfig(
            learning_rate=1e-30, weight_decay=0, warmup_epochs=0, schedule="constant", ema_decay=0.9
        ),
        train=TrainConfig(steps=1),
        workdir=str(tmp_path / "run"),
    )
    source, evaluation = open_source(config.data, "train"), open_source(config.data, "eval")
    task = Classification(tiny_model(classes=10), 8, source.mean, source.std)
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    initial = load_torch_weights(path, shapes)
    feed = ImageFeed(config.data, source, evaluation)
    assert train(config, task, feed, experiment="test", initial=initial) == 0

    wanted = prepare(config, task, len(source)).state
    state = Checkpointer(tmp_path / "run" / "checkpoints", keep=1).restore(wanted).state
    loaded = load_torch_weights(path, variables_of(tiny_model()))["params"]
    fresh_head = jax.jit(task.init)(jax.random.key(config.seed))[0]["head"]["kernel"]
    for params in (state.params, state.ema[0]):
        head = params.pop("head")
        np.testing.assert_allclose(head["kernel"], fresh_head, rtol=1e-6)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6),
            params,
            {name: layer for name, layer in loaded.items() if name != "head"},
        )
