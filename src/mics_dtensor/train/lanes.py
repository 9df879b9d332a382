"""Where a run stands in its data, so that another number of data-parallel ranks can go on there.

The documents are cut once, into as many lanes as the run first had data-parallel ranks. Sequence n
of the run is sequence n // lanes of lane n % lanes, and rank r of W reads every W-th from r on. A
step reads the same sequences whatever W is, and with W = lanes each rank reads one lane alone, in
the order of torchtitan's own loader. Where W and the lanes share no divisor every rank tokenizes
every lane, and passes over what others read.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch.utils.data import default_collate
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader, HuggingFaceTextDataset

from mics_dtensor.errors import CheckpointError
from mics_dtensor.train.data import FEWER_RANKS, check_documents

Sequence = tuple[dict[str, torch.Tensor], torch.Tensor]


class Lane:
    """One part of the documents, and how many sequences have been taken from it."""

    def __init__(self, data: HuggingFaceTextDataset) -> None:
        self._data, self._sequences = data, iter(data)
        self.num_taken = 0

    def take(self) -> Sequence:
        """The next one. Raises StopIteration where the data end."""
        taken: Sequence = next(self._sequences)
        self.num_taken += 1
        return taken

    def pass_over(self, num_taken: int) -> None:
        """Up to `num_taken` sequences from the beginning."""
        while self.num_taken < num_taken:
            self.take()

    def state(self) -> bytes:
        """Position, and tokens that are read and not yet taken."""
        return pickle.dumps((self.num_taken, self._data.state_dict()))

    def go_to(self, state: bytes) -> None:
        """Where `state` was asked for; on a lane from which nothing is taken yet."""
        self.num_taken, its = pickle.loads(state)
        self._data.load_state_dict(its)
        self._sequences = iter(self._data)


class LaneLoader(BaseDataLoader):
    """torchtitan's text loader, with a position that other data-parallel sizes can take up."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        """torchtitan's; without worker processes, which keep positions of their own."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,  # noqa: ARG002  of torchtitan's loader
        **of_dataset: Any,
    ) -> None:
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self._batch_size, self._pins = local_batch_size, config.pin_memory
        self._path = config.dataset_path

        def lane(number: int, num_lanes: int) -> Lane:
            return Lane(
                HuggingFaceTextDataset(
                    dataset_name=config.dataset,
                    dataset_path=config.dataset_path,
                    dp_rank=number,
                    dp_world_size=num_lanes,
                    infinite=config.infinite,
                    **of_dataset,
                )
            )

        self._make_lane: Callable[[int, int], Lane] = lane
        self._num_lanes, self._start, self._num_read = dp_world_size, 0, 0
        self._lanes: dict[int, Lane] = {}
        self._is_awaiting = False
        # What cannot be read is told now, not in the first step; an empty lane once it is known
        # whether a checkpoint has cut the documents otherwise (refuse_few_documents).
        with suppress(IndexError):
            self._lane(dp_rank)

    @property
    def position(self) -> dict[str, int]:
        """Lanes, and sequences read by all ranks."""
        taken = self._start + self._num_read * self.dp_world_size
        return {"lanes": self._num_lanes, "sequences": taken}

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                batch = [self._next() for _ in range(self._batch_size)]
            except StopIteration:
                return
            inputs, labels = default_collate(batch)
            if self._pins:
                inputs = {name: value.pin_memory() for name, value in inputs.items()}
                labels = labels.pin_memory()
            yield inputs, labels

    def _next(self) -> Sequence:
        number = self._start + self.dp_rank + self._num_read * self.dp_world_size
        lane = self._lane(number % self._num_lanes)
        lane.pass_over(number // self._num_lanes)
        taken = lane.take()
        self._num_read += 1
        return taken

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._make_lane(number, self._num_lanes)
        return self._lanes[number]

    def _mine(self) -> list[int]:
        """The lanes that this rank reads of."""
        step = gcd(self._num_lanes, self.dp_world_size)
        return list(range((self._start + self.dp_rank) % step, self._num_lanes, step))

    def refuse_few_documents(self) -> None:
        """Where a lane of a file would be empty, for which a run would look forever. ConfigError.

        To be asked once the lanes are known: a run that goes on has those that it first had.
        """
        first, way = "", FEWER_RANKS
        if self._start:
            first = " that the run first had"
            way = 'begin the data anew with checkpoint.exclude_from_loading = ["dataloader"]'
        readers = f"{self._num_lanes} data-parallel ranks{first}"
        check_documents(self._path, self._num_lanes, readers=readers, way=way)

    def take_up(self, position: dict[str, int]) -> None:
        """Before a checkpoint of that position is loaded: what this rank will want of it."""
        self._num_lanes, self._start = position["lanes"], position["sequences"]
        self._num_read, self._lanes, self._is_awaiting = 0, {}, True

    def state_dict(self) -> dict[str, Any]:
        """The lanes of this rank, all of them where the run as a whole stands."""
        state: dict[str, Any] = dict(self.position)
        for number in self._mine():
            if self._is_awaiting:
                state[f"lane_{number}"] = b""
                continue
            lane = self._lane(number)
            lane.pass_over(-((number - state["sequences"]) // self._num_lanes))
            state[f"lane_{number}"] = lane.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `take_up` has asked for."""
        if not state_dict:
            return
        self.take_up(state_dict)
        for number in self._mine():
            if not state_dict.get(f"lane_{number}"):
                raise CheckpointError(
                    f"the checkpoint has no position of lane {number} of the data"
                )
            self._lane(number).go_to(state_dict[f"lane_{number}"])
        self._is_awaiting = False
