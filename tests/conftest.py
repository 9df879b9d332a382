"""Rules for all tests: what is skipped where, and whose asserts are explained."""

from importlib.util import find_spec

import pytest
from hypothesis import settings

# The same examples every time, and no limit on one: CI's machine may be slow for a moment.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("house")

pytest.register_assert_rewrite("harness")

HAS_TORCHTITAN = find_spec("torchtitan") is not None
HAS_FRAMEWORKS = all(map(find_spec, ("accelerate", "lightning", "transformers")))
collect_ignore = [] if HAS_TORCHTITAN else ["train"]
collect_ignore += [] if HAS_FRAMEWORKS else ["integrations"]


def pytest_report_header() -> list[str]:
    header = [] if HAS_TORCHTITAN else ["tests/train is left out: torchtitan is not installed"]
    if not HAS_FRAMEWORKS:
        header.append(
            "tests/integrations is left out: Lightning, Accelerate or transformers is not"
        )
    return header


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))
