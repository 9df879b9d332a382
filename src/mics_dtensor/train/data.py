"""What a run reads: the built-in text, a local file, or a data set that torchtitan knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train import documents
from mics_dtensor.train.documents import READERS

if TYPE_CHECKING:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    from mics_dtensor.train.config import RunConfig
    from mics_dtensor.train.tables_job import Training, Validation

PYTHON_DOCS = "python_docs"
PYTHON_DOCS_VALIDATION = "python_docs_validation"
# The name under which torchtitan's registry of data sets finds our reader of local files.
LOCAL_FILE = "local_file"
FEWER_RANKS = "start fewer ranks"


def dataloader_config(config: RunConfig, *, carries_position: bool = True) -> BaseDataLoader.Config:
    """The Config whose `build` makes the loader. No file is opened yet.

    Ours, whose position other data-parallel sizes can take up, or torchtitan's, where worker
    processes keep it or nobody asks for it.
    """
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from mics_dtensor.train.lanes import LaneLoader

    is_ours = carries_position and config.training.dataloader.num_workers == 0
    loader = LaneLoader if is_ours else HuggingFaceTextDataLoader
    register()
    training = config.training
    local = local_file(training.dataset_path)
    return loader.Config(
        dataset=LOCAL_FILE if local else training.dataset,
        dataset_path=training.dataset_path,
        infinite=True,
    )


def tokenizer_config(config: RunConfig) -> BaseTokenizer.Config:
    """The Config whose `build` makes the tokenizer: the one that the run names, or ours."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from mics_dtensor.train.tokenizer import BuiltInTokenizer

    if assets_path(config):
        return HuggingFaceTokenizer.Config()
    return BuiltInTokenizer.Config(cache_dir=str(Path(config.job.dump_folder) / "tokenizer"))


def assets_path(config: RunConfig) -> str:
    """The folder of the tokenizer; "" stands for the built-in one. The older name wins, as ever."""
    return config.model.tokenizer_path or config.model.hf_assets_path


def register() -> None:
    """Tell torchtitan's registry our names. Twice is the same as once."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    DATASETS[PYTHON_DOCS] = DatasetConfig(
        path="pydoc_data.topics", loader=_load_python_docs, sample_processor=_text_of
    )
    DATASETS[PYTHON_DOCS_VALIDATION] = DatasetConfig(
        path="pydoc_data.topics", loader=_load_held_out_docs, sample_processor=_text_of
    )
    DATASETS[LOCAL_FILE] = DatasetConfig(path="", loader=documents.load, sample_processor=_text_of)


def local_file(path: str | None) -> Path | None:
    """The file that a `dataset_path` names; None for a folder or a Hugging Face name."""
    return Path(path) if path and Path(path).suffix in READERS else None


def check_data(config: RunConfig, *, num_readers: int, goes_on: bool = False) -> None:
    """Refuse data that cannot be read; `num_readers` data-parallel ranks each need a document.

    A run that `goes_on` reads for training as many parts as it first had ranks, which is known
    when its checkpoint is: LaneLoader.refuse_few_documents.

    Reads no more of a file than that takes. Raises ConfigError, on this rank alone: another node
    may have the file. The program compares the ranks' answers before it goes on.
    """
    tables: list[tuple[str, Training | Validation]] = [("training", config.training)]
    if config.validation.enable:
        tables.append(("validation", config.validation))
    for table, read in tables:
        given = f"{table}.dataset_path {read.dataset_path!r}"
        path = local_file(read.dataset_path)
        if path is not None:
            num_documents = 1 if goes_on and table == "training" else num_readers
            readers = f"{num_readers} data-parallel ranks"
            _check_file(path, given, num_documents, readers, FEWER_RANKS)
        else:
            _check_named(table, read.dataset, read.dataset_path)
    assets = assets_path(config)
    if assets and not _holds_tokenizer(Path(assets)):
        raise ConfigError(
            f"model.hf_assets_path {assets!r} holds no tokenizer.json, vocab.json or vocab.txt; "
            'name the folder of one, or write hf_assets_path = "" for the built-in tokenizer'
        )


def check_documents(
    dataset_path: str | None, num_documents: int, *, readers: str, way: str
) -> None:
    """Refuse a file of [training] with fewer documents than `readers`. Raises ConfigError."""
    if (path := local_file(dataset_path)) is not None:
        _check_file(path, f"training.dataset_path {dataset_path!r}", num_documents, readers, way)


def unknown_data_set(table: str, name: str, known: Sequence[str]) -> ConfigError:
    """For a data set of [training] or [validation] that no registry has."""
    return ConfigError(
        f"{table}.dataset {name!r} is not known; choose from {', '.join(known)}, or name a file "
        f"({', '.join(READERS)}) in {table}.dataset_path"
    )


def _check_named(table: str, dataset: str, path: str | None) -> None:
    from torchtitan.hf_datasets.text_datasets import DATASETS

    register()
    names = sorted(set(DATASETS) - {LOCAL_FILE})
    if dataset.lower() not in names:
        raise unknown_data_set(table, dataset, names)
    where = path or DATASETS[dataset.lower()].path
    if Path(where).is_file():
        raise ConfigError(
            f"{table}.dataset_path {where!r} is a file of unknown kind; its name must end in one "
            f"of {', '.join(READERS)}"
        )
    # "allenai/c4" is a name on the Hugging Face Hub; these are folders of this machine.
    is_local = where.startswith((".", "/", "~")) or where.count("/") > 1
    if is_local and not Path(where).is_dir():
        raise ConfigError(
            f"{table}.dataset {dataset!r} lies in the folder {where!r}, which does not exist; name "
            f"one that does, or a file ({', '.join(READERS)}), in {table}.dataset_path, or set "
            f"{table}.dataset to {PYTHON_DOCS!r}, which needs neither"
        )


def _check_file(path: Path, given: str, num_documents: int, readers: str, way: str) -> None:
    if not path.is_file():
        raise ConfigError(
            f"{given} does not exist; name a {', '.join(READERS)} file that does, or set dataset "
            f"to {PYTHON_DOCS!r} and delete dataset_path for text that needs no file"
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"{given} is empty; it must hold at least {num_documents} documents")
    found = sum(1 for _ in zip(range(num_documents), documents.of_file(path, given), strict=False))
    if found < num_documents:
        raise ConfigError(
            f"{given} holds {found} documents, fewer than the {readers}, each of which reads its "
            f"own; give more documents or {way}"
        )


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / n).is_file() for n in ("tokenizer.json", "vocab.json", "vocab.txt"))


def _text_of(record: dict[str, Any]) -> str:
    text: str = record["text"]
    return text


def _load_python_docs(path: str) -> Any:
    """A map-style data set: torchtitan's loader shuffles it anew each time it begins again."""
    from datasets import Dataset

    from mics_dtensor.train.text import training_docs

    del path
    return Dataset.from_dict({"text": training_docs()})


def _load_held_out_docs(path: str) -> Any:
    from datasets import Dataset

    from mics_dtensor.train.text import validation_docs

    del path
    return Dataset.from_dict({"text": validation_docs()})
