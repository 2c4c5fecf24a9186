"""What several processes leave behind when they are done: nothing that Python's end could meet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from test_train_loop import argv

# the comm of every thread that is there when the run is done
TELLS_ITS_THREADS = """
import os, sys
from pathlib import Path
from train.cli import main
code = main(sys.argv[2:])
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
Path(sys.argv[1] + os.environ["RANK"]).write_text("".join(names))
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_a_group_outlives_it(target_dir: Path, data: Path, tmp_path: Path) -> None:
    """Such a thread, if it drops a tensor while Python ends, aborts the process: a run that is done exits with -6."""
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(TELLS_ITS_THREADS)
    arguments = argv(target_dir, data, tmp_path / "run", "optim.steps=2", "optim.batch_size=3", "optim.optimizer=adamw")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(program), str(told), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["finished"]
    for rank in range(2):
        names = (tmp_path / f"told{rank}").read_text()
        assert "python" in names and "gloo" not in names
