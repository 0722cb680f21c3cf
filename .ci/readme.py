"""Run the README's Python blocks in order, as a reader pastes them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import torch

import diffpure

assert Path(diffpure.__file__).is_relative_to(sys.prefix), f"{diffpure.__file__} is not the installed package"
torch.set_num_threads(1)
scope: dict[str, object] = {}
blocks = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), flags=re.MULTILINE | re.DOTALL)
os.chdir(tempfile.mkdtemp())  # the blocks write runs and pages
for block in blocks:
    exec(compile(block, f"README: {block[:40]!r}", "exec", dont_inherit=True), scope)
print(f"README: {len(blocks)} blocks ran with {diffpure.__file__}")
