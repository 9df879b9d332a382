"""Models, flavors and data sets that a run may name, and what is said of others. Pure: no torch.

The program learns them from torchtitan's registries; `mics explain`, which has none, from here. A
test holds the two against each other.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from mics_dtensor.errors import ConfigError
from mics_dtensor.plan.presets import MODELS, flavors
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.data import (
    PYTHON_DOCS,
    PYTHON_DOCS_VALIDATION,
    local_file,
    unknown_data_set,
)
from mics_dtensor.train.tables_job import Training, Validation
from mics_dtensor.train.values import shown

DATA_SETS = ("c4", "c4_test", "c4_validation", PYTHON_DOCS, PYTHON_DOCS_VALIDATION)
"""torchtitan 0.3.0's and ours."""

OPTIMIZERS = ("Adam", "AdamW")
"""torchtitan 0.3.0 has DistMuon too, which wants to be told by hand how each parameter is cut."""


def refuse_unknown(config: RunConfig) -> None:
    """Raises ConfigError, as the program would, for a name that neither torchtitan nor we know.

    A module of the user's own (a name with a dot) is not imported: it may know more of both, and
    it need not be on this machine.
    """
    if config.optimizer.name not in OPTIMIZERS:
        raise unknown_optimizer(config.optimizer.name)
    chosen = config.activation_checkpoint
    option = chosen.selective_ac_option
    if chosen.mode == "selective" and option != "op" and not option.isdecimal():
        raise unknown_option(option)
    model = config.model
    if "." in model.name:
        if lacks_registry(model.name):
            raise no_registry(model.name)
        return
    if model.name not in MODELS:
        raise unknown_model(model.name, MODELS)
    if model.flavor not in flavors(model.name):
        raise unknown_flavor(model.flavor, f"torchtitan.models.{model.name}", flavors(model.name))
    tables: list[tuple[str, Training | Validation]] = [("training", config.training)]
    if config.validation.enable:
        tables.append(("validation", config.validation))
    for table, read in tables:
        if local_file(read.dataset_path) is None and read.dataset.lower() not in DATA_SETS:
            raise unknown_data_set(table, read.dataset, DATA_SETS)


def unknown_model(name: str, known: Sequence[str]) -> ConfigError:
    """For a name without a dot that is none of torchtitan's."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"[model] name = {shown(name)} is unknown; {hint}choose from {list(known)}, or name a "
        "module of your own with a dot (your.module)"
    )


def lacks_registry(name: str) -> bool:
    """Whether a module is here and its text does not speak of a model_registry. Imports nothing."""
    if (module := sys.modules.get(name)) is not None:
        return not callable(getattr(module, "model_registry", None))
    folders, loader = None, None
    for part in name.split("."):
        if (spec := PathFinder.find_spec(part, folders)) is None:
            return False
        folders, loader = spec.submodule_search_locations, spec.loader
    if not isinstance(loader, SourceFileLoader):
        return False
    text = Path(loader.path).read_text(encoding="utf-8", errors="replace")
    return not any(words in text for words in ("model_registry", "import *", "__getattr__"))


def no_registry(name: str) -> ConfigError:
    """For a module that can make no model."""
    return ConfigError(
        f"[model] name = {shown(name)}: the module has no model_registry(flavor, ...), which "
        "returns torchtitan's ModelSpec"
    )


def unknown_flavor(flavor: str, module: str, known: Sequence[str]) -> ConfigError:
    """For a flavor that the module's registry has not."""
    return ConfigError(
        f"[model] flavor = {shown(flavor)} is no flavor of {module}; choose from {list(known)}"
    )


def unknown_optimizer(name: str) -> ConfigError:
    """For one that the program cannot make."""
    return ConfigError(f"optimizer.name = {shown(name)}; choose from {list(OPTIMIZERS)}")


def unknown_option(option: str) -> ConfigError:
    """For what selective checkpointing may be of."""
    return ConfigError(
        f'activation_checkpoint.selective_ac_option = {shown(option)}; write "op", or a number '
        'such as "2" for every second block'
    )


def too_many_blocks(wanted: int, name: str, flavor: str, has: int) -> ConfigError:
    """For blocks beyond those of a flavor."""
    return ConfigError(
        f"[model] n_layers = {wanted}: {name} {flavor} has {has} blocks, and only llama3 may have "
        "more than its flavor; write fewer, or choose another flavor"
    )


def fp32_experts(name: str) -> ConfigError:
    """For experts that compute in bfloat16 whatever they are given."""
    return ConfigError(
        f'training.mixed_precision_param = "float32": experts of {name} give what '
        "torch._grouped_mm computes, bfloat16, and torchtitan's deterministic_scatter_add adds it "
        'to tokens of the same dtype alone; write "bfloat16"'
    )
