"""Attention on CPU is the function that the kernels compute, whole and under context parallel."""

from pathlib import Path

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_sliding_window_mask_mod,
)
from train.small_run import configured, ours

from mics_dtensor.train.dense_attention import DenseAttention

LENGTH = 48


def mask_of(positions: torch.Tensor, window: int | None) -> BlockMask:
    mods = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions)]
    mods += [] if window is None else [get_sliding_window_mask_mod(window)]
    return create_block_mask(and_masks(*mods), 2, None, LENGTH, LENGTH, device="cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads_of_keys", [4, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_flex_attention(window: int | None, heads_of_keys: int, scale: float | None) -> None:
    torch.manual_seed(0)
    documents = [[*range(20), *range(28)], [*range(5), *range(43)]]
    mask = mask_of(torch.tensor(documents), window)
    q = torch.randn(2, LENGTH, 4, 16)
    k, v = torch.randn(2, 2, LENGTH, heads_of_keys, 16)
    expected, aux = flex_attention(
        *(each.transpose(1, 2) for each in (q, k, v)),
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    attention = DenseAttention.Config().build()
    got = attention(q, k, v, attention_masks=mask, scale=scale)
    torch.testing.assert_close(got, expected.transpose(1, 2))
    heard = []

    def transform(out: torch.Tensor, log_sum_exp: torch.Tensor) -> torch.Tensor:
        heard.append(log_sum_exp)
        return 2 * out

    got = attention(q, k, v, attention_masks=mask, scale=scale, out_transform=transform)
    torch.testing.assert_close(got, 2 * expected.transpose(1, 2))
    torch.testing.assert_close(heard[0], aux.lse.transpose(1, 2))


@pytest.mark.parametrize("balancer", ["headtail", "ptrr", "none"])
@ranks(2, timeout_s=100)
def test_parts_of_a_sequence_are_the_whole(tmp_path: Path, balancer: str) -> None:
    """Two ranks that share a sequence, against two that read the same one: equal weights, so equal
    losses, and gradients of one reader instead of two.
    """
    common = ("--training.seq_len=256", "--parallelism.spmd_backend=partial_dtensor")
    whole = ours(*configured(tmp_path, *common, "--training.global_batch_size=2"))
    degree = ("--parallelism.context_parallel_degree=2", "--training.global_batch_size=1")
    balanced = f"--parallelism.context_parallel_load_balancer={balancer}"
    parts = ours(*configured(tmp_path, *common, *degree, balanced))
    torch.manual_seed(1)
    tokens = torch.randint(0, 2048, (1, 257))
    positions = torch.tensor([[*range(100), *range(156)]])
    losses = []
    for trainer in (whole, parts):
        inputs = {"input": tokens[:, :-1].clone(), "positions": positions.clone()}
        losses.append(
            trainer.forward_backward_step(
                input_dict=inputs, labels=tokens[:, 1:], global_valid_tokens=torch.tensor(256)
            ).detach()
        )
    dist.all_reduce(losses[1])
    torch.testing.assert_close(losses[1], losses[0])
    (of_whole,), (of_parts,) = whole.model_parts, parts.model_parts
    named = dict(of_whole.named_parameters())
    for name, parameter in of_parts.named_parameters():
        twice = 2 * parameter.grad.full_tensor()
        torch.testing.assert_close(twice, named[name].grad.full_tensor(), msg=name)
    for trainer in (whole, parts):
        trainer.close()
