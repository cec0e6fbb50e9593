"""`rpe3d` in several processes, as `accelerate launch` starts them on several GPUs (on a CPU it starts one alone)."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys


def launched(count, *argv):
    """The exit codes of `rpe3d` with these arguments in so many processes, and their stderr."""
    return launched_python(count, "-m", "rpe3d", *argv)


def launched_python(count, *argv):
    """The exit codes of so many Pythons, with what `accelerate launch` sets for them, and their stderr."""
    port = str(_free_port())
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, argv)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)}, **pipes)
        for i in range(count)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [process.returncode for process in processes], said


def _free_port() -> int:
    """Below those that a system hands out by itself: it is seconds until the first process listens there."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
