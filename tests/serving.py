"""A server for tests: `pagoda serve` in a process of its own, on a free port."""

import http.client
import json
import re
import signal
import subprocess
import threading
import time

from capi import ROOT

COMMAND = ROOT / "target/release/pagoda"
LLAMA = ROOT / "tests/data/generate/llama"
# Longer than anything takes on a busy machine.
HANGS = 120


class Server:
    """Runs until it is stopped. `line` is what it printed first, `errors` what it wrote to stderr."""

    def __init__(self, *arguments):
        command = [COMMAND, "serve", "--listen", "127.0.0.1:0", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors = []
        self.reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.line = self.process.stdout.readline()
        found = re.search(r"https?://([\d.]+):(\d+)", self.line)
        if not found:
            self.process.kill()
            self.reader.join()
            raise RuntimeError(f"it did not start: {''.join(self.errors)}")
        self.host, self.port = found[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, number=signal.SIGTERM):
        """Ends it. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(HANGS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join(HANGS)
        self.process.stdout.close()
        return code

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=HANGS)

    def request(self, method, path, body=None, headers=None):
        """The status, the headers and the body of a response; a body of JSON is parsed."""
        connection = self.connect()
        try:
            if isinstance(body, (dict, list)):
                body = json.dumps(body)
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            if response.headers.get_content_type() == "application/json":
                data = json.loads(data)
            return response.status, response.headers, data
        finally:
            connection.close()

    def get(self, path, headers=None):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, headers=None):
        return self.request("POST", path, body, headers)


def until(condition, seconds=HANGS):
    """Waits until a condition holds, and returns what it returned."""
    end = time.monotonic() + seconds
    while True:
        if found := condition():
            return found
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
