"""`rpe3d serve`: start an OpenAI-compatible server (vLLM) for a model under a law, on this machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import need, size
from rpe3d.cli.extend import add_law_arguments, law_given, law_parameters
from rpe3d.cli.model import summary
from rpe3d.cli.terminal import note, say
from rpe3d.config import ConfigError

PORT = 8000
STDERR = 2  # the descriptor


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint from `rpe3d extend`, or with --context any model it takes")
    add("--context", metavar="N", type=size, help="target context length, e.g. 64k")
    add("--law", help="law name, name:parameter=value, or law file; default 3d-rpe")
    add_law_arguments(parser)
    add("--port", metavar="N", type=int, default=PORT, help=f"port to listen on; default {PORT}")
    add("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only")
    add("--vllm", metavar="NAME=VALUE", action="append", default=[], help="option for vLLM's server; repeatable")


def run(arguments: Namespace) -> int:
    need("serve", "transformers")
    from rpe3d.serve import metrics, refusals
    from rpe3d.serve.launch import check_installed, check_options, check_port, command, prepare, stop, wait_until_ready
    from rpe3d.serve.words import Words

    check_installed()
    given = None if arguments.law is None else law_given(arguments.law, arguments)
    parameters = dict(given.parameters) if given else law_parameters(arguments)
    context = arguments.context or (given.context if given else None)
    served = prepare(arguments.model, given.name if given else None, context, parameters)
    if given is not None:
        given.check(served.law.pretrained)
    options = [f"--{option.lstrip('-')}" for option in arguments.vllm]
    check_options(options, served.law)
    check_port(arguments.host, arguments.port)
    for text in served.notes:
        note(text)
    url = f"http://{arguments.host}:{arguments.port}"
    say(f"starting vLLM: {summary(served.law)}")
    line = command(served, arguments.model, arguments.host, arguments.port, options)
    # Its output goes to stderr, and the terminal's signals to us alone: a second one would cut its shutdown short.
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in ends}  # nohup ignores one, and it stays so
    folder = tempfile.TemporaryDirectory(prefix="rpe3d-serve-")
    reason = Path(folder.name) / "refusal.json"
    named = os.environ | metrics.environment(served.law) | {refusals.VARIABLE: str(reason)}
    read, write = os.pipe()
    process = subprocess.Popen(line, stdout=write, stderr=write, start_new_session=True, env=named)
    os.close(write)
    try:
        wait_until_ready(process, url, reason, Words(read, STDERR))
        say(_curl(url, arguments.model))
        print(f"{url}/v1", flush=True)  # last: whoever waits for this line finds everything else printed
        code = process.wait()  # 0 also where its engine was killed
        raise ConfigError(f"vLLM exited by itself (exit code {code})", "see its output above, and start it again")
    except KeyboardInterrupt:
        return 0
    finally:
        if process.poll() is None:
            stop(process)
        for number, handler in before.items():
            signal.signal(number, handler)
        folder.cleanup()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _curl(url: str, model: str) -> str:
    """Return a command that asks the server for a few tokens."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32})
    header = "Content-Type: application/json"
    return shlex.join(["curl", f"{url}/v1/completions", "-H", header, "-d", body])
