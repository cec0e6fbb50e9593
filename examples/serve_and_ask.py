"""Start an OpenAI-compatible server (vLLM) for an extended model, ask it a question, and stop it.

    python examples/serve_and_ask.py [MODEL] [--context 32k] [--port 8000]

Needs `pip install '.[serve]'`, in a separate virtual environment.
"""

import argparse
import json
import subprocess
import sys
from urllib.request import Request, urlopen

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="default")
parser.add_argument("--context", default="32k")
parser.add_argument("--port", default="8000")
given = parser.parse_args()

line = ["-m", "rpe3d", "serve", given.model, "--context", given.context, "--port", given.port]
server = subprocess.Popen([sys.executable, *line], stdout=subprocess.PIPE, text=True)
try:
    url = server.stdout.readline().strip()  # its address, once it is ready
    if not url:
        sys.exit("the server did not start: read its message above")
    document = "The sea is blue. " * 50 + "The passkey is 25248. " + "The grass is green. " * 50
    body = {"model": given.model, "prompt": document + "The passkey is", "max_tokens": 6, "temperature": 0}
    request = Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        print(json.load(answer)["choices"][0]["text"])
finally:
    server.terminate()
    server.wait()
