"""A temporary folder for a suite, which is deleted after it, also with files of killed servers."""

import atexit
import getpass
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dflash-tests-"


def own_folder() -> str:
    """Returns a temporary folder that is deleted with this process; processes of the tests write there.

    Deletes the folders of killed suites. Code that torch has compiled stays in its usual place for the next suite.
    """
    common = tempfile.gettempdir()
    for folder in Path(common).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not _lives(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    own = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{common}/torchinductor_{getpass.getuser()}")
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker's is inside that of the first process
        os.environ["TMPDIR"] = own
    return own


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
