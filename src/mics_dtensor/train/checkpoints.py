"""torchtitan's CheckpointManager, whose checkpoints are complete or not there, and verified."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import (
    DATALOADER,
    MODEL,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools.utils import GarbageCollection

from mics_dtensor.checkpoint.checkpoints import as_keys, newest_good
from mics_dtensor.checkpoint.commit import aged, begin, commit, is_whole, named, partial_of
from mics_dtensor.checkpoint.manifest import Manifest, files_of, versions
from mics_dtensor.checkpoint.placement import Placement
from mics_dtensor.checkpoint.reading import Reader
from mics_dtensor.checkpoint.saving import Saving
from mics_dtensor.checkpoint.states import device_of, replication_groups
from mics_dtensor.checkpoint.transfer import Keeping, read
from mics_dtensor.errors import CheckpointError
from mics_dtensor.layout import Layout
from mics_dtensor.train.converted import way_on
from mics_dtensor.train.lanes import LaneLoader
from mics_dtensor.train.position import position_of, take_up
from mics_dtensor.world import agreed, gathered, rank_here

logger = logging.getLogger(__name__)


class WholeCheckpoints(CheckpointManager):
    """Saves and resumes a run of the program. See docs/checkpoints.md."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's, where they are placed, and what their manifests say of the run."""

        placement: Placement = "spread"
        layout: Layout | None = None
        run: Mapping[str, Any] | None = None

    def __init__(self, config: Config, **built: Any) -> None:
        # Threads and groups are ours: torchtitan makes none of its own.
        plain: Any = replaced(config, async_mode="disabled", keep_latest_k=0)
        super().__init__(plain, **built)
        if not self.enable:
            return
        self._config = config
        self._parts = list(built["model_parts"])
        self._keeping = Keeping(keep_last=config.keep_latest_k, placement=config.placement)
        self._saving = Saving(asynchronous=AsyncMode(config.async_mode) != AsyncMode.DISABLED)
        self._saved_step = -1
        if not self.load_only:
            self._saving.refuse_busy(Path(self.folder))

    def save_now(self, curr_step: int) -> bool:
        """Save all of the run, whatever the interval, and return when it is complete. Collective.

        For a run that is told to stop. False where nothing is saved in this run.
        """
        if not self.enable or self.load_only:
            return False
        self.maybe_wait_for_saving()
        if self._saved_step != curr_step:
            path = Path(self.folder) / f"step-{curr_step}"
            self.dcp_save(self._states_without(()), str(path), AsyncMode.DISABLED)
            self.maybe_wait_for_saving()
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,  # noqa: ARG002  the options of this run decide
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> None:
        """What torchtitan calls to save: all of the run, or its weights."""
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        path = Path(checkpoint_id)
        state = agreed(lambda: values_of(state_dict), others_as=CheckpointError)
        if to_hf:
            self._save_hf(state, path)
            return
        about = self._about(path, state)
        if DATALOADER in state and self._keeping.placement == "partition_group":
            # The first partition group has the positions of its own ranks alone.
            said = gathered(state[DATALOADER])
            state[DATALOADER] = {name: its for of_rank in said for name, its in of_rank.items()}
        self.save_future = self._saving.save(
            lambda: state, path, about=about, keeping=self._keeping
        )
        self._saved_step = about.step if about.contents == "training" else -1

    def _about(self, path: Path, state: Mapping[str, Any]) -> Manifest:
        loader, trainer = self.states[DATALOADER], self.states[TRAIN_STATE]
        has_all = TRAIN_STATE in state
        return Manifest(
            step=int(path.name.removeprefix("step-")),
            contents="training" if has_all else "model",
            files=(),
            tokens=trainer.ntokens_seen * loader.dp_world_size,
            layout=None if self._config.layout is None else as_keys(self._config.layout),
            versions=versions("torch", "torchtitan"),
            config=self._config.run,
            data=position_of(loader) if has_all else None,
        )

    def _save_hf(self, state: dict[str, Any], path: Path) -> None:
        """Hugging Face's files, written by torchtitan, under the same rules."""
        partial, is_first, owner = partial_of(path), rank_here() == 0, self._saving.owner
        about = self._about(path, state)
        agreed(lambda: begin(path, owner) if is_first else None, others_as=CheckpointError)
        super().dcp_save(state, str(partial), AsyncMode.DISABLED, to_hf=True)

        def complete() -> None:
            names = [str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file()]
            commit(path, dataclasses.replace(about, files=files_of(partial, names)))

        gathered(None)  # every rank has written
        agreed(lambda: complete() if is_first else None, others_as=CheckpointError)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """What torchtitan calls for initial_load_path, which another program may have written."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = self._reader(Path(checkpoint_id), verify=False)
        manifest, is_all = reader.manifest, TRAIN_STATE in state_dict
        if is_all and manifest is not None and manifest.contents == "model":
            raise CheckpointError(
                f"checkpoint.initial_load_path {checkpoint_id} holds weights alone: write "
                "initial_load_model_only = true, or name a checkpoint of all of a run"
            )
        self._go_on(state_dict, reader, manifest)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        folder = Path(self.folder)
        if step != -1:
            self._resume(folder / f"step-{step}")
            self._say_it_goes_back(folder, step)
            is_loaded = True
        else:
            is_loaded = newest_good(folder, self._resume) is not None or bool(super()._load(-1))
        self._refuse_few_documents()
        return is_loaded

    def _find_load_step(self, folder: str = "") -> int:  # noqa: ARG002
        """For torchtitan's `_load`, which is asked only where there is nothing to resume from."""
        return -1

    def _resume(self, path: Path) -> Manifest:
        """All of the run from `path`; of step 0, a seed, its weights. Collective."""
        # Without a manifest it is torchtitan's own, which a user has to ask for by its step.
        asked_for = self._config.load_step != -1
        reader = self._reader(path, verify=not asked_for)
        manifest = reader.manifest or Manifest(
            step=self._config.load_step, contents="training", files=()
        )
        if reader.manifest is None:
            logger.warning("%s has no manifest, so its bytes are not verified", path)
        only_weights = manifest.step == 0
        if manifest.contents == "model" and not only_weights:
            raise CheckpointError(self._holds_weights_alone(path))
        logger.info("Loading the checkpoint from %s.", path)
        if only_weights:
            self._fill(self.states[MODEL].state_dict(), reader)
        else:
            self._go_on(self._states_without(self.exclude_from_loading), reader, manifest)
        return manifest

    def _go_on(self, state: dict[str, Any], reader: Reader, manifest: Manifest | None) -> None:
        """Load `state`, and of the position and the tokens what ranks had. Collective.

        Without a manifest torchtitan's own loader may know its position.
        """
        loader, trainer = self.states[DATALOADER], self.states[TRAIN_STATE]
        if DATALOADER in state and (manifest is not None or isinstance(loader, LaneLoader)):
            take_up(loader, None if manifest is None else manifest.data, reader.path)
            self._refuse_few_documents()
        self._fill(state, reader)
        if TRAIN_STATE in state and manifest is not None and manifest.tokens is not None:
            trainer.ntokens_seen = manifest.tokens // loader.dp_world_size

    def _states_without(self, names: Iterable[str]) -> dict[str, Any]:
        """As torchtitan lays them out: parameters by their names, the rest by its own."""
        left_out = {*names, MODEL}
        state: dict[str, Any] = {
            name: its for name, its in self.states.items() if name not in left_out
        }
        state |= self.states[MODEL].state_dict()
        return state

    def _reader(self, path: Path, *, verify: bool) -> Reader:
        parts = self._parts
        return Reader(
            path, groups=replication_groups(parts), device=device_of(parts), verify=verify
        )

    def _fill(self, state: dict[str, Any], reader: Reader) -> None:
        with way_on(reader.manifest):
            read(state, reader)
        self.states[MODEL].load_state_dict(state)
        GarbageCollection.collect("GC collection for checkpoint loading.")

    def _refuse_few_documents(self) -> None:
        """Once the loader knows its lanes, which a checkpoint may bring. Collective."""
        loader = self.states[DATALOADER]
        if isinstance(loader, LaneLoader):
            agreed(loader.refuse_few_documents)

    def _say_it_goes_back(self, folder: Path, step: int) -> None:
        later = [its.name for number, its in named(folder).items() if number > step]
        if later and not self.load_only:
            logger.warning(
                "checkpoint.load_step = %d goes back behind %s: what this run saves is the newest "
                "then, takes the place of the same step, and keep_latest_k deletes the others "
                "first. To keep them: another checkpoint.folder, with initial_load_path = "
                '"%s" and initial_load_model_only = false',
                step,
                ", ".join(later),
                folder / f"step-{step}",
            )

    def _holds_weights_alone(self, path: Path) -> str:
        folder = Path(self.folder)
        whole = [
            step
            for step, its in aged(folder).items()
            if is_whole(its) and Manifest.read(its).contents == "training"
        ]
        go_on = f"write checkpoint.load_step = {whole[-1]}" if whole else "there is no other step"
        return (
            f"{path} holds weights alone (the last of a run with checkpoint.last_save_model_only = "
            "true, or converted with --weights-only), so no run can go on from it. To go on from "
            f"the newest whole one: {go_on}. To begin anew from its weights: "
            f'checkpoint.initial_load_path = "{path}" and another checkpoint.folder. To save or '
            "convert one to go on from: last_save_model_only = false, or no --weights-only"
        )

    def _purge_stale_checkpoints(self) -> None:
        """Done when a checkpoint is committed."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._saving.wait()

    def _close(self) -> None:
        if "_saving" in vars(self):  # also called where __init__ has failed
            self._saving.close()


def values_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be saved of each."""
    return {
        name: its.state_dict() if isinstance(its, Stateful) else its for name, its in states.items()
    }


def replaced(config: Any, **values: Any) -> Any:
    """A copy of a Config with other values."""
    return dataclasses.replace(config, **values)


def config_of(
    config: CheckpointManager.Config, *, placement: Placement, layout: Layout, run: Any
) -> CheckpointManager.Config:
    """Ours, with torchtitan's values. A folder that is no file system's stays torchtitan's."""
    if "://" in config.folder:
        logger.warning(
            "checkpoint.folder %s is not on a file system: torchtitan writes there, without a "
            "manifest, and a crash may leave a part of a checkpoint",
            config.folder,
        )
        return config
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return WholeCheckpoints.Config(
        **values | {"placement": placement, "layout": layout, "run": run}
    )
