"""Typed configuration: one frozen dataclass a section, and the only home of a default.

The text below a field is its help on the command line, and its type decides how
text from a YAML file or a flag is read (`jaxdl.commandline`). What a type cannot
say, such as fields that exclude each other, the `_check` methods refuse in
sentences meant for the user, one line a problem.

A program's configuration is a `Config` whose sections `model` and `data` are its own.
"""

from jaxdl.config.images import ImageConfig, ImageDataConfig, ImageModelConfig
from jaxdl.config.optimizer import EPSILON, OptimizerConfig
from jaxdl.config.parallel import BATCH_AXES, MESH_AXES, ParallelConfig, uneven_batch
from jaxdl.config.precision import DTYPES, POLICY_NAMES, PrecisionConfig
from jaxdl.config.run import Config, DataConfig, MemoryConfig, ModelConfig, ProfileConfig, TrainConfig
from jaxdl.config.text import (
    BertConfig,
    BertModelConfig,
    FinetuneConfig,
    LabelledDataConfig,
    TextDataConfig,
)

__all__ = [
    "BATCH_AXES", "DTYPES", "EPSILON", "MESH_AXES", "POLICY_NAMES",
    "BertConfig", "BertModelConfig", "Config", "DataConfig", "FinetuneConfig",
    "ImageConfig", "ImageDataConfig", "ImageModelConfig", "LabelledDataConfig", "MemoryConfig",
    "ModelConfig", "OptimizerConfig", "ParallelConfig", "PrecisionConfig", "ProfileConfig", "TextDataConfig",
    "TrainConfig",
    "uneven_batch",
]  # fmt: skip
