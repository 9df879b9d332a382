"""Rules for all tests: where a test that needs a GPU is skipped, and whose asserts are explained."""

import pytest

pytest.register_assert_rewrite("harness")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))
