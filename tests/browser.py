"""A real browser for tests: Debian's Chromium without a window, by its own protocol over pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

HANGS = 60


class Browser:
    """One page. `errors` has what its console and its scripts complained about, `asked` the addresses that it asked."""

    def __init__(self, folder, width=1200, height=900, dark=False, mobile=False):
        program = shutil.which("chromium")
        assert program, "Chromium is missing. Install it (on Debian: apt-get install chromium)"
        to_read, to = os.pipe()
        out, out_write = os.pipe()
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]

        def pipes():
            # Copies first: one of them may have the number of another's place.
            reader, writer = os.dup(to_read), os.dup(out_write)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        self.process = subprocess.Popen(
            [program, *arguments],
            preexec_fn=pipes,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(out_write)
        self.to, self.out, self.rest, self.number = to, out, b"", 0
        self.errors, self.asked, self.session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(HANGS)
        os.close(self.to)
        os.close(self.out)

    def call(self, method, **parameters):
        """Sends a command and returns its result. Events that come meanwhile are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            found = self.receive()
            if found.get("id") == self.number:
                assert "error" not in found, found["error"]
                return found["result"]

    def receive(self):
        while b"\0" not in self.rest:
            assert select.select([self.out], [], [], HANGS)[0], "the browser does not answer"
            data = os.read(self.out, 1 << 16)
            assert data, "the browser went away"
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])
        return message

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script):
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + HANGS
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script} does not come true; errors: {self.errors}"
            time.sleep(0.05)
        return value

    def fill(self, id, text):
        self.run(f"document.getElementById({json.dumps(id)}).value = {json.dumps(text)}")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
