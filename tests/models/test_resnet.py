import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxdl.errors import ConfigError
from jaxdl.models import MODELS, ResNet, build, resolve_stem

# Published counts (torchvision, 1000 classes) and multiply-adds of convolutions and linear layers at 224x224.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
MACS = {
    "resnet18": 1_814_073_344,
    "resnet34": 3_663_761_408,
    "resnet50": 4_089_184_256,
    "resnet101": 7_801_405_440,
    "resnet152": 11_513_626_624,
}


def tiny(**kwargs) -> ResNet:
    return ResNet((1, 1), **{"bottleneck": True, "num_classes": 5, "width": 4, "stem": "small", **kwargs})


def abstract_variables(model, size=224):
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)


def size(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def count_macs(model) -> int:
    """Multiply-adds of the forward pass, read off its jaxpr."""
    variables = nn.unbox(abstract_variables(model))
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False))(variables, images)
    total = 0
    for equation in jaxpr.eqns:
        (out,) = equation.outvars
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            total += out.aval.size * kernel.size // kernel.shape[-1]
        elif equation.primitive.name == "dot_general":
            total += out.aval.size * equation.invars[0].aval.shape[-1]
    return total


@pytest.mark.parametrize("name", MODELS)
def test_parameter_and_mac_counts_equal_the_published_ones(name):
    model = build(name, num_classes=1000, convolution="lax")
    assert size(abstract_variables(model)["params"]) == PARAMETERS[name]
    assert count_macs(model) == MACS[name]


def test_batch_statistics_of_resnet50():
    stats = nn.unbox(abstract_variables(build("resnet50", num_classes=1000))["batch_stats"])
    assert size(stats) == 53_120
    assert {x.dtype for x in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("stem", "input_size"), [("imagenet", 64), ("small", 8)])
@pytest.mark.parametrize("bottleneck", [True, False])
def test_output_shapes(stem, input_size, bottleneck):
    model = tiny(stem=stem, bottleneck=bottleneck)
    x = jnp.ones((2, input_size, input_size, 3))
    variables = nn.unbox(jax.jit(model.init, static_argnames="train")(jax.random.key(0), x, train=False))
    logits, updates = model.apply(variables, x, train=True, mutable=["batch_stats"])
    assert logits.shape == (2, 5)
    assert jax.tree.structure(updates["batch_stats"]) == jax.tree.structure(variables["batch_stats"])
    assert model.apply(variables, x, train=False).shape == (2, 5)


def test_compute_and_parameter_dtypes():
    model = tiny(dtype=jnp.bfloat16)
    variables = nn.unbox(abstract_variables(model, 8))
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    images = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"])[0])(
        variables, images
    )
    assert jaxpr.out_avals[0].dtype == jnp.float32
    products = [e for e in jaxpr.eqns if e.primitive.name in ("conv_general_dilated", "dot_general")]
    assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)

    halved = nn.unbox(abstract_variables(tiny(param_dtype=jnp.bfloat16), 8))
    assert {x.dtype for x in jax.tree.leaves(halved["params"])} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(halved["batch_stats"])} == {jnp.dtype("float32")}


def test_every_array_carries_logical_axis_names():
    variables = abstract_variables(tiny(), 8)
    specs = nn.get_partition_spec(variables)
    block = specs["params"]["layer1_0"]
    assert block["conv1"]["kernel"] == P(None, None, "channel_in", "channel")
    assert block["norm1"]["scale"] == P("channel")
    assert specs["params"]["head"]["kernel"] == P("channel", "classes")
    assert specs["batch_stats"]["stem"]["norm"]["mean"] == P("channel")
    boxes = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata))
    assert all(isinstance(box, nn.LogicallyPartitioned) for box in boxes)


def test_last_norm_of_each_block_starts_at_zero_so_that_blocks_start_as_identities():
    model = ResNet((2,), False, 5, width=4, stem="small")
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 4))
    block = model.layers()[2]
    variables = nn.unbox(block.init(jax.random.key(0), x, train=False))
    assert not variables["params"]["norm2"]["scale"].any()
    assert jnp.array_equal(block.apply(variables, x, train=False), nn.relu(x))


def test_layers_chain_to_the_whole_network():
    model = tiny()
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    variables = nn.unbox(model.init(jax.random.key(0), x, train=False))
    y = x
    *body, head = model.layers()
    assert [layer.name for layer in body] == ["stem", "layer1_0", "layer2_0"]
    for layer in body:
        y = layer.apply({c: variables[c][layer.name] for c in variables}, y, train=False)
    y = head.apply({"params": variables["params"]["head"]}, y)
    assert jnp.allclose(y, model.apply(variables, x, train=False), rtol=1e-6, atol=1e-6)


def test_unknown_model():
    with pytest.raises(ConfigError, match=r"resnet51.*resnet50"):
        build("resnet51", num_classes=10)


def test_stem_follows_the_image_size():
    assert resolve_stem("auto", 64) == "small"
    assert resolve_stem("auto", 65) == "imagenet"
    assert resolve_stem("imagenet", 8) == "imagenet"
