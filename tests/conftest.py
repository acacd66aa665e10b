"""Settings of every test process."""

import atexit
import os
import shutil
import tempfile

# Ranks of a test share this machine, whatever GPUs it has, and figures of CPU and GPU must not be compared. Before
# torch, so that forked ranks and subprocesses inherit it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tokens that tests make are not kept among the user's own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")

import torch

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
torch.set_num_threads(1)
