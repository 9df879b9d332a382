"""The tokenizer of runs that name none: byte-level BPE, trained here on the built-in text."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from mics_dtensor.errors import ConfigError, MicsError
from mics_dtensor.train.text import python_docs
from mics_dtensor.world import agreed, rank_here

VOCAB_SIZE = 2048  # the vocabulary of torchtitan's debug models
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")  # as torchtitan looks for them
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


class BuiltInTokenizer(HuggingFaceTokenizer):
    """Reads any text: a byte that was never seen is a token of its own.

    Building one is collective over the world where a process group exists: rank 0 trains it if
    `cache_dir` holds none, and the others wait for it. Raises ConfigError on every rank where one
    cannot write it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        """Where the trained tokenizer lies; `tokenizer_path` of `build` is not looked at."""

        cache_dir: str

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        del tokenizer_path
        documents = python_docs()
        folder = folder_of(documents, Path(config.cache_dir))
        agreed(lambda: train_once(documents, folder) if rank_here() == 0 else None)
        # A node that does not share rank 0's disk makes its own, of the same bytes.
        agreed(lambda: train_once(documents, folder))
        super().__init__(tokenizer_path=str(folder))


def readable(config: BaseTokenizer.Config, folder: str) -> BaseTokenizer:
    """The tokenizer of a run; `folder` is its model.hf_assets_path. Raises ConfigError, with the
    file that cannot be read. Collective where it is the built-in one.
    """
    if isinstance(config, BuiltInTokenizer.Config):
        said, way_out = config.cache_dir, "delete the folder, and it is made anew"
    else:
        there = (name for name in TOKENIZERS if (Path(folder) / name).is_file())
        said = str(Path(folder) / next(there, TOKENIZERS[0]))
        way_out = "copy it again, or name another folder in model.hf_assets_path"
    try:
        tokenizer: BaseTokenizer = config.build(tokenizer_path=folder)
    except (MicsError, OSError, RuntimeError):  # a full disk, a rank that is gone
        raise
    except Exception as error:  # what `tokenizers` raises is nothing narrower
        if isinstance(error, json.JSONDecodeError) and said.endswith(TOKENIZERS[0]):
            said = str(Path(folder) / "tokenizer_config.json")  # the only one that Python reads
        words = " ".join(str(error).split())
        raise ConfigError(f"the tokenizer {said} cannot be read ({words}); {way_out}") from error
    return tokenizer


def folder_of(documents: Sequence[str], cache_dir: Path) -> Path:
    """A folder a text: another Python has other topics, and must not read this one's tokenizer."""
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()[:12]
    return cache_dir / f"bpe-{VOCAB_SIZE}-{digest}"


def train_once(documents: Sequence[str], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, if they are not there.

    Each file appears whole or not at all, tokenizer.json last: where it is, the other is too.
    Raises ConfigError where there is no room, or no right, to write.
    """
    if (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    config = {"bos_token": BEGIN, "eos_token": END}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "tokenizer_config.json", json.dumps(config))
        write_atomically(folder / "tokenizer.json", tokenizer.to_str())
    except OSError as error:
        raise ConfigError(
            f"the built-in tokenizer cannot be written to {folder} ({error.strerror}); make room "
            "there, or name another job.dump_folder"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a crash, finds the old content, the new, or no file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
