"""Writes the network of a run in Hugging Face's layout, for the `transformers` library and others.

    python -m experiments.export_bert RUN DIRECTORY

RUN is the directory of a run of experiments.bert or .finetune; its newest checkpoint counts, and the
moving averages if it kept them. DIRECTORY gets config.json, model.safetensors, vocab.txt and
tokenizer_config.json.
"""

import json
from pathlib import Path

from jaxdl import environment
from jaxdl.commandline.programs import Parser, emit, leave_after
from jaxdl.errors import CheckpointError, ConfigError, DataError


def main() -> None:
    """Exports a run."""
    parser = Parser("python -m experiments.export_bert", __doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("directory", type=Path, help="where to write; files of the same names are replaced")
    arguments = parser.parse_args()
    export(arguments.run, arguments.directory)
    emit(f"config.json, model.safetensors and vocab.txt are in {arguments.directory}\n")


def export(run: Path, directory: Path) -> None:
    """Writes the network of a run.

    Raises:
        ConfigError: it is no run of a BERT, or of one that the layout does not know.
        CheckpointError: it cannot be read, or the directory not written.
    """
    environment.prepare("default")
    # JAX is imported only now: it reads the environment.
    from jaxdl.config import BertModelConfig
    from jaxdl.data.text.wordpiece import from_json
    from jaxdl.models.huggingface import save_bert
    from jaxdl.train.pretrained import CHECKPOINTS, NETWORK, TOKENIZER, described, is_file, newest_parameters

    if not is_file(run / NETWORK):
        raise ConfigError(f"{run} is not the directory of a run of experiments.bert or experiments.finetune")
    # Refuses a network that normalises before its branches, which the layout has no word for.
    sizes, epsilon = described(BertModelConfig(name="pretrained", weights=str(run)))
    params = newest_parameters(run / CHECKPOINTS)
    try:
        tokenizer = from_json((run / TOKENIZER).read_text("utf-8"))
        names = json.loads((run / "classes.json").read_text()) if (run / "classes.json").exists() else []
    except (OSError, ValueError, DataError) as error:
        raise CheckpointError(f"the vocabulary or the classes of {run} cannot be read ({error})") from error
    words = sizes.words - sizes.unused
    labels = dict(enumerate(names)) or None
    save_bert(directory, params, sizes, epsilon=epsilon, words=words, id2label=labels)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.lowercase}
    try:
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in tokenizer.tokens), "utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    leave_after(main)
