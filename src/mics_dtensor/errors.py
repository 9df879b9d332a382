"""The tree of errors. Each message says what was given, what holds, and what would work.

MicsError
├── TopologyError      (ValueError)    the nodes of the ranks are not what they must be
├── ConfigError        (ValueError)    a setting, a model or a mesh that cannot be run
├── PlanError          (ValueError)    a question that the planner cannot answer
├── CheckpointError    (ValueError)    a checkpoint that is not whole, or not this model's
├── AccumulationError  (RuntimeError)  micro-steps and gradients that do not add up
├── CommunicationError (RuntimeError)  a collective failed or timed out on some rank
└── ReplicaError       (RuntimeError)  replicas that should be equal are not
"""


class MicsError(Exception):
    """The root: `except MicsError` catches all that this library raises on purpose."""


class TopologyError(MicsError, ValueError):
    """The nodes of the ranks are unequal, interleaved, or disagree with what was said."""


class ConfigError(MicsError, ValueError):
    """A setting, a model or a mesh that cannot be run; nothing has been allocated or changed."""


class PlanError(MicsError, ValueError):
    """A question that the planner cannot answer."""


class CheckpointError(MicsError, ValueError):
    """A checkpoint that is incomplete, damaged, or does not fit this run."""


class AccumulationError(MicsError, RuntimeError):
    """Micro-steps or gradients do not add up; the sharded gradients are as they were before."""


class CommunicationError(MicsError, RuntimeError):
    """A collective failed or timed out on some rank; the message names unit, stage and ranks."""


class ReplicaError(MicsError, RuntimeError):
    """Replicas hold different values where they must hold the same."""
