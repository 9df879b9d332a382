"""What gradient_accumulation is given beside the model."""

from __future__ import annotations

from typing import Any

import torch

from mics_dtensor.errors import AccumulationError

HOP_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse_arguments(
    *,
    num_micro_steps: Any,
    second_hop_dtype: Any,
    bucket_size_bytes: Any,
    overlap_boundary: bool,
    static_gradients: bool,
) -> None:
    """Raise AccumulationError at entry for what would fail, or mean nothing, at the boundary."""
    if num_micro_steps is not None and (type(num_micro_steps) is not int or num_micro_steps < 1):
        raise AccumulationError(
            f"num_micro_steps is {num_micro_steps!r}; give a whole number, 1 or more, or None "
            "where it is not known beforehand"
        )
    if second_hop_dtype is not None and second_hop_dtype not in HOP_DTYPES:
        raise AccumulationError(
            f"second_hop_dtype is {second_hop_dtype!r}; give one of "
            f"{', '.join(str(dtype) for dtype in HOP_DTYPES)}, or None for that of the reduction"
        )
    if type(bucket_size_bytes) is not int or bucket_size_bytes < 0:
        raise AccumulationError(
            f"bucket_size_bytes is {bucket_size_bytes!r}; give a whole number of bytes, 0 or more "
            "(0: a message for each unit)"
        )
    if overlap_boundary and static_gradients:
        raise AccumulationError(
            "overlap_boundary takes gradients out of .grad and static_gradients keeps them there; "
            "choose one"
        )
