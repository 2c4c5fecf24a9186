"""Programs in processes of their own that begin in no time: forked from a server that has imported them already."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["conftest", "train.cli", "train.data_cli", "deepspeed"]  # what is not there is left out


def start_server() -> None:
    """Start the server that imports everything, if it does not run; processes get the environment of this moment."""
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("DS_ACCELERATOR", "cpu")
        CONTEXT.set_forkserver_preload(IMPORTED)
        multiprocessing.forkserver.ensure_running()


def start(program: str, arguments: list[str]) -> BaseProcess:
    """`main(arguments)` of a module, as a command would run it."""
    start_server()
    process = CONTEXT.Process(target=_run, args=(program, arguments))
    process.start()
    return process


def _run(program: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    sys.exit(importlib.import_module(program).main(arguments))
