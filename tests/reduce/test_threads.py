"""Large tensors are read by torch's own threads: the same numbers, also where there are no such threads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchtap.reduce import StatsBlock, kernel

pytestmark = pytest.mark.skipif(kernel.native is None, reason="the native kernel is not built here")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
)
def test_numbers_do_not_depend_on_how_many_threads_read(dtype, threads):
    value = torch.randn(1_000_003).mul_(40).to(dtype)
    block = StatsBlock(3)
    for row, number in enumerate((1, 2, 5)):
        threads(number)
        block.measure_into(row, 0, value)
    states = block.states()
    np.testing.assert_array_equal(states[0], states[1])
    np.testing.assert_array_equal(states[0], states[2])


def test_numbers_do_not_depend_on_whose_threads_read(threads):
    threads(2)
    value = torch.randn(1_000_003)
    block = StatsBlock(2)
    block.measure_into(0, 0, value)
    kernel.native.use_pool(0)
    try:
        block.measure_into(1, 0, value)
    finally:
        kernel.share_threads(kernel.native)
    np.testing.assert_array_equal(block.states()[0], block.states()[1])


_FORK = """
import os, torch
from torchtap.reduce import StatsBlock
torch.set_num_threads(2)
value, block = torch.ones(1 << 20), StatsBlock(1)
value.sum()
block.measure_into(0, 0, value)
child = os.fork()
if child == 0:
    block.measure_into(0, 0, value)  # torch's threads are not here: waiting for them would never end
    os._exit(0 if block.results()[0][0] == 2 << 20 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_reads_with_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr
