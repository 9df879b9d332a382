"""torch's wrapper of activation checkpointing, for a policy that wraps some of the blocks."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["CheckpointWrapper"]
