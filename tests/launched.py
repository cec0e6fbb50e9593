"""`rpe3d` in several processes, as `accelerate launch` starts them on several GPUs (on a CPU it starts one alone)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def launched(count, *argv):
    """The exit codes of so many processes, with what `accelerate launch` sets for them, and their stderr."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rpe3d", *map(str, argv)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)}, **pipes)
        for i in range(count)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [process.returncode for process in processes], said
