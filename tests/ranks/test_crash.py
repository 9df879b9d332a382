"""Killed at any moment, or out of disk: the last complete checkpoint always loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.crashing import DEATHS, Lives, disk_or_skip, small_disk


def lives_on(folder: Path, num_lives: int, *, seed: int) -> Lives:
    lives = Lives(folder, seed=seed)
    for number in range(num_lives):
        lives.live_and_die(DEATHS[number % len(DEATHS)])
    return lives


@pytest.mark.timeout(400)
def test_no_life_ends_with_half_a_checkpoint() -> None:
    with disk_or_skip() as folder:
        lives = lives_on(folder, 6, seed=1)
    assert lives.told["refused"] > 0
    assert lives.newest > 6


@pytest.mark.matrix
@pytest.mark.timeout(4000)
def test_a_hundred_lives() -> None:
    with small_disk() as folder:
        lives_on(folder, 100, seed=2)
