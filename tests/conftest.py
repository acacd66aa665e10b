"""Settings of every test process."""

import os

# Ranks of a test share this machine, whatever GPUs it has, and figures of CPU and GPU must not be compared. Before
# torch, so that forked ranks and subprocesses inherit it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

torch.set_num_threads(1)
