"""DeepSpeed's batch, micro-batch and accumulation in the keys of a run."""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.deepspeed_sought import Sought
from mics_dtensor.train.values import shown

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def batch(its: Sought) -> None:
    """Of batch, micro-batch and accumulation two are enough, as DeepSpeed has it.

    So it is where the third is "auto": Hugging Face's Trainer fills in what follows from the two.
    """
    given = {key: its.number(key) for key in (TOTAL, MICRO, STEPS)}
    for key, value in given.items():
        _refuse_no_count(key, value)
    ranks = _data_parallel_ranks(its)
    auto = its.auto & set(given)
    if auto and sum(value is not None for value in given.values()) < 2:
        _what_is_known(its, given)
        return
    micro, total = _reckoned(given, ranks)
    if micro is None:
        _say_accumulation(its, given[STEPS])
        return
    its.values["training.local_batch_size"] = micro
    its.values["training.global_batch_size"] = -1 if total is None else total
    for key in auto:
        its.differs[key] = "it follows from the other two, and is in [training] as they have it"


def _reckoned(given: dict[str, float | None], ranks: int | None) -> tuple[int | None, int | None]:
    """Micro-batch and batch; no batch where it is one micro-batch of all ranks."""
    total, micro, steps = given[TOTAL], given[MICRO], given[STEPS]
    said = ", ".join(f"{key} = {value}" for key, value in given.items() if value is not None)
    if micro is None:
        if total is None:
            return None, None
        if ranks is None:
            raise ConfigError(
                f"{said}: the micro-batch depends on the number of ranks; give --world-size"
            )
        micro = total / ((steps or 1) * ranks)
    if total is None and steps is not None and steps > 1:
        if ranks is None:
            raise ConfigError(
                f"{said}: the batch of a step depends on the number of ranks; give --world-size"
            )
        total = micro * steps * ranks
    at_once = micro * (ranks or 1) * (steps or 1)
    wrong = total is not None and bool(total % at_once)
    if total is not None and ranks is not None and steps is not None:
        wrong = total != at_once
    if micro != int(micro) or wrong:
        raise ConfigError(
            f"{said}: train_batch_size must be micro-batch x accumulation x data-parallel ranks"
            f"{'' if ranks is None else f', of which there are {ranks}'}; DeepSpeed refuses it too"
        )
    return int(micro), None if total is None else int(total)


def _what_is_known(its: Sought, given: dict[str, float | None]) -> None:
    """One of the three or none, where another is "auto": nothing can be reckoned."""
    if (micro := given[MICRO]) is not None:
        its.values["training.local_batch_size"] = int(micro)
    if (total := given[TOTAL]) is not None:
        its.values["training.global_batch_size"] = int(total)
    _say_accumulation(its, given[STEPS])


def _say_accumulation(its: Sought, steps: float | None) -> None:
    if steps is not None:
        its.differs[STEPS] = (
            "without a batch size it says nothing; write training.local_batch_size, and "
            f"training.global_batch_size = {int(steps)} x that x the data-parallel ranks"
        )


def _data_parallel_ranks(its: Sought) -> int | None:
    """Ranks with samples of their own: those that share a sequence count once."""
    shared, readers = its.number("sequence_parallel_size"), its.number("data_parallel_size")
    _refuse_no_count("sequence_parallel_size", shared)
    _refuse_no_count("data_parallel_size", readers)
    world = its.world_size
    if shared is None:
        if readers is not None:  # DeepSpeed reads it only beside the other
            its.differs["data_parallel_size"] = (
                "without sequence_parallel_size DeepSpeed does not read it; the ranks are the "
                "launcher's"
            )
        return world
    if shared > 1:
        its.values["parallelism.context_parallel_degree"] = int(shared)
        its.differs["sequence_parallel_size"] = (
            "Ulysses exchanges heads; context parallel cuts the sequence too, and exchanges keys "
            "and values: the same attention, other messages"
        )
    if readers is not None and world is not None and readers * shared != world:
        raise ConfigError(
            f"data_parallel_size = {readers} x sequence_parallel_size = {shared} is not "
            f"--world-size {world}; DeepSpeed refuses it too"
        )
    if world is not None and world % shared:
        raise ConfigError(
            f"sequence_parallel_size = {shared} does not divide --world-size {world}; each "
            "sequence is shared by so many ranks"
        )
    if readers is not None:
        return int(readers)
    return None if world is None else int(world // shared)


def _refuse_no_count(key: str, value: float | None) -> None:
    if value is not None and (value < 1 or value != int(value)):
        raise ConfigError(f"{key} = {shown(value)}; it must be a whole number, 1 or more")
