"""The contenders of `experiments.benchmark resnet50`: an SGD step over 1,000 classes, ours and PyTorch's."""

from typing import TYPE_CHECKING, Any

from experiments.benchmark_steps import Step, compiled, torch_step

if TYPE_CHECKING:
    from experiments.benchmark import Job

CLASSES = 1000
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4


def jaxdl_step(job: "Job") -> tuple[Step, dict[str, Any]]:
    """Compiles the step that `experiments.resnet50` would train with."""
    import numpy as np

    from jaxdl import models
    from jaxdl.config import ImageConfig, ImageDataConfig, OptimizerConfig, ParallelConfig, TrainConfig
    from jaxdl.data.images.types import IMAGENET_MEAN, IMAGENET_STD
    from jaxdl.train.task import Classification

    config = ImageConfig(
        data=ImageDataConfig(name="synthetic", batch_size=job.batch_size, image_size=job.size),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            schedule="constant",
            warmup_epochs=0,
        ),
        parallel=ParallelConfig(data=1),
        train=TrainConfig(steps=1),
    )
    model = models.build(
        job.benchmark,
        num_classes=CLASSES,
        stem="imagenet",
        convolution="lax" if job.contender.endswith("lax") else "auto",
    )
    task = Classification(model, job.size, IMAGENET_MEAN, IMAGENET_STD)
    rng = np.random.default_rng(0)
    shape = (job.batch_size, job.size, job.size, 3)
    examples: dict[str, np.ndarray] = {
        "image": rng.integers(256, size=shape, dtype=np.uint8),
        "label": rng.integers(CLASSES, size=job.batch_size, dtype=np.int32),
    }
    return compiled(config, task, examples)


def pytorch_step(job: "Job") -> tuple[Step, dict[str, Any]]:
    """Builds the same in PyTorch, with the memory layout that is fastest on CPUs."""
    import torch

    model = torch_resnet50().to(memory_format=torch.channels_last).train()
    images = torch.randn(job.batch_size, 3, job.size, job.size)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (job.batch_size,))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=LEARNING_RATE * job.batch_size / 256,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
    )
    return torch_step(model, optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels))


def torch_resnet50() -> Any:
    """ResNet-50 version 1.5 as a `torch.nn.Module`."""
    from torch import nn

    def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[Any]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return [layer, nn.BatchNorm2d(outputs)]

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, features: int, stride: int) -> None:
            super().__init__()
            outputs = 4 * features
            self.body = nn.Sequential(
                *convolution(inputs, features, 1),
                nn.ReLU(inplace=True),
                *convolution(features, features, 3, stride),
                nn.ReLU(inplace=True),
                *convolution(features, outputs, 1),
            )
            same = stride == 1 and inputs == outputs
            self.shortcut = nn.Sequential(*([] if same else convolution(inputs, outputs, 1, stride)))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            return self.relu(self.body(x) + self.shortcut(x))

    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, size in enumerate((3, 4, 6, 3)):
        features = 64 * 2**stage
        for i in range(size):
            layers.append(Block(channels, features, 2 if stage > 0 and i == 0 else 1))
            channels = 4 * features
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
