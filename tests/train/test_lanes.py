"""The position in the data: no sample twice, none left out, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")
import torch
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from mics_dtensor.errors import CheckpointError
from mics_dtensor.train import data
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.lanes import LaneLoader
from mics_dtensor.train.position import take_up

# 2026-11: torchdata's loader, which is torchtitan's, asks torch for it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SEQ_LEN = 24


@pytest.fixture
def built(tmp_path: Path) -> Any:
    file = tmp_path / "documents.jsonl"
    lines = [f'{{"text": "{number} {"word " * (3 + number % 17)}"}}' for number in range(60)]
    file.write_text("\n".join(lines))
    config = RunConfig()
    config = replace(
        config,
        training=replace(config.training, dataset_path=str(file)),
        model=replace(config.model, hf_assets_path=""),
        job=replace(config.job, dump_folder=str(tmp_path)),
    )
    tokenizer = data.tokenizer_config(config).build(tokenizer_path="")
    kinds: dict[Any, Any] = {
        LaneLoader: data.dataloader_config(config),
        HuggingFaceTextDataLoader: data.dataloader_config(config, carries_position=False),
    }

    def build(ranks: int, batch: int = 1, kind: Any = LaneLoader) -> list[Any]:
        return [
            kinds[kind].build(
                dp_world_size=ranks,
                dp_rank=rank,
                tokenizer=tokenizer,
                seq_len=SEQ_LEN,
                local_batch_size=batch,
                snapshot_every_n_steps=None,
            )
            for rank in range(ranks)
        ]

    return build


def read(loaders: list[Any], sequences: int, batch: int = 1) -> list[tuple[int, ...]]:
    """In the order of the run: rank by rank of each round, and round by round."""
    iterators = [iter(loader) for loader in loaders]
    found = []
    for _ in range(sequences // (len(loaders) * batch)):
        batches = [next(iterator) for iterator in iterators]
        for row in range(batch):
            for inputs, labels in batches:
                tokens = (*inputs["input"][row].tolist(), *inputs["positions"][row].tolist())
                found.append((*tokens, *labels[row].tolist()))
    return found


def test_with_as_many_ranks_it_is_torchtitans_order(built: Any) -> None:
    ours, theirs = built(4, batch=2), built(4, batch=2, kind=HuggingFaceTextDataLoader)
    assert isinstance(ours[0], LaneLoader)
    assert isinstance(theirs[0], HuggingFaceTextDataLoader)
    assert read(ours, 240, batch=2) == read(theirs, 240, batch=2)  # several epochs


@pytest.mark.parametrize("first", [4, 3])
def test_any_number_of_ranks_goes_on_where_the_others_stood(built: Any, first: int) -> None:
    straight = read(built(first), 240)
    at, loaders = 0, built(first)
    read_on: list[tuple[int, ...]] = []
    for ranks in (first, 2, 6, 1, 5, 8, first):
        loaders, before = built(ranks), loaders
        if read_on:
            states = [loader.state_dict() for loader in before]
            saved = {name: its for state in states for name, its in state.items()}
            for state in states:  # the same name has the same value on all ranks
                assert all(saved[name] == its for name, its in state.items())
            for loader in loaders:
                take_up(loader, before[0].position, Path("step-1"))
                wanted = loader.state_dict()
                loader.load_state_dict({name: saved[name] for name in wanted})
        read_on += read(loaders, 30 // ranks * ranks)
        at = len(read_on)
        assert loaders[0].position == {"lanes": first, "sequences": at}
    assert read_on == straight[:at]


def test_reading_changes_nothing_by_saving(built: Any) -> None:
    straight = read(built(2), 40)
    loaders = built(2)
    iterators = [iter(loader) for loader in loaders]
    for number in range(20):
        batches = [next(iterator) for iterator in iterators]
        for rank, (inputs, _) in enumerate(batches):
            expected = straight[2 * number + rank][:SEQ_LEN]
            assert torch.equal(inputs["input"][0], torch.tensor(expected))
        for loader in loaders:
            loader.state_dict()


def test_a_position_that_cannot_be_carried_over_is_refused(built: Any) -> None:
    (lanes,), (workers,) = built(1), built(1, kind=HuggingFaceTextDataLoader)
    for loader, saved, words in (
        (lanes, {"readers": 4}, "worker processes of 4 data-parallel ranks, .* has 1 .* without"),
        (workers, {"readers": 4}, "start 4 data-parallel ranks with the same training.dataloader"),
        (workers, {"lanes": 4, "sequences": 8}, "without worker processes, .*num_workers = 0, or"),
        (lanes, None, r"^step-1 does not say .* deepspeed` wrote cannot: begin the data anew with"),
    ):
        with pytest.raises(CheckpointError, match=words):
            take_up(loader, saved, Path("step-1"))
    take_up(workers, {"readers": 1}, Path("step-1"))
