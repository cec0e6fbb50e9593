"""`rpe3d` in several processes, as `accelerate launch` starts them on several GPUs (on a CPU it starts one alone)."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile


def launched(count, *argv):
    """The exit codes of `rpe3d` with these arguments in so many processes, and their stderr."""
    return launched_python(count, "-m", "rpe3d", *argv)


def launched_python(count, *argv):
    """The exit codes of so many Pythons, with what `accelerate launch` sets for them, and their stderr."""
    port = str(free_port())
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


def forked(*launches):
    """As `launched` for each (count, *arguments), in processes that are forked from one, which imports but once."""
    given = [[str(free_port()), count, *map(str, argv)] for count, *argv in launches]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _fork(port, count, *argv):
    """The exit codes of so many forks, which end as any Python does, and their stderr."""
    children, files = [], [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115
    for rank, file in enumerate(files):
        if not (child := os.fork()):
            shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(file.fileno(), 2)
            code = cli.main(list(argv))
            gc.unfreeze()  # or extension modules complain of leaks at the exit
            sys.exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for file in files:
        file.seek(0)
    return codes, [file.read() for file in files]


def free_port() -> int:
    """Below those that a system hands out by itself: it is seconds until the first process listens there."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


if __name__ == "__main__":
    import transformers  # noqa: F401

    from rpe3d import cli, evaluate  # noqa: F401

    gc.freeze()
    print(json.dumps([_fork(*given) for given in json.loads(sys.argv[1])]))
