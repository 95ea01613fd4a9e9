"""Headless Chromium, driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/).

Messages go over two pipes, so nothing but Chromium itself is needed: no driver, no port.

    python browser.py URL FILE.png    writes a picture of a page
    python browser.py                 ends with 1 if there is no Chromium
"""

import base64
import collections
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
ANSWER_WITHIN = 60


def found():
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page of a browser that this process has started. Used in a `with` block."""

    def __init__(self, width=1280, height=900):
        self.size = width, height
        self.events = collections.deque()
        self.number = 0
        self.unread = b""

    def __enter__(self):
        self.folder = tempfile.mkdtemp()
        to_browser, self.to = os.pipe()
        self.back, from_browser = os.pipe()
        # Chromium reads at descriptor 3 and writes to 4. Both ends are moved out of their way first.
        arguments = [
            found(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        arguments += ["--disable-dev-shm-usage", f"--user-data-dir={self.folder}", "about:blank"]
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.session = None
        (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(*self.size)
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.call("Browser.close")
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)
        # Its processes may still end.
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method, **parameters):
        """Result of a method; events that arrive meanwhile are kept in `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self.to, rest) :]
        deadline = time.monotonic() + ANSWER_WITHIN
        while True:
            answer = self.read(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def read(self, deadline):
        """The next message. An event is kept, too."""
        while b"\0" not in self.unread:
            if not select.select([self.back], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self.back, 1 << 20)
            if not read:
                raise OSError("the browser has ended")
            self.unread += read
        message, self.unread = self.unread.split(b"\0", 1)
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, url):
        """Opens a URL and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script):
        """Value of an expression in the page; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, script, within=30):
        """Waits until an expression is true."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if self.run(f"Boolean({script})"):
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{script} does not come true; the page has: {self.text()[:2000]}")

    def text(self):
        """What the page shows."""
        return self.run("document.body.innerText")

    def press(self, key):
        """Presses and releases a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def type(self, text):
        """Types into the element with the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width, height):
        """Sets the size of the window in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features):
        """Sets what the user prefers, such as color_scheme='dark'."""
        features = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path):
        """Writes a picture of the window."""
        shot = self.call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def complaints(self):
        """What the browser has complained about: errors of scripts, refused requests, the content security policy."""
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                found.append(str([argument.get("value") for argument in parameters["args"]]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return found

    def requests(self):
        """URLs that were asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


def main():
    if len(sys.argv) == 1:
        sys.exit(found() is None)
    url, path = sys.argv[1:]
    with Page(1280, 760) as page:
        page.open(url)
        page.until("!document.body.innerText.includes('Loading...')")
        page.picture(path)
    if complaints := page.complaints():
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
