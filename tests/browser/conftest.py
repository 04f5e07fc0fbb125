"""A real JupyterLab on loopback and a real Chromium; nothing is downloaded and nothing of the user's is touched."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Screenshots are kept here: look at them.
PICTURES = ROOT / "test-output"

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
_START_S = 90


def _chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    return None


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _server(folder, home):
    """JupyterLab with its own configuration, so that no setting of the user's decides a test."""
    port, token = _free_port(), secrets.token_hex(16)
    environment = {**os.environ, "HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        environment[f"JUPYTER_{name}"] = str(home / name.lower())
    for name in ("SETTINGS_DIR", "WORKSPACES_DIR"):
        environment[f"JUPYTERLAB_{name}"] = str(home / name.lower())
    environment["TILELANG_CACHE_DIR"] = os.environ.get("TILELANG_CACHE_DIR") or str(Path.home() / ".tilelang" / "cache")
    settings = home / "settings_dir" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
    ]  # fmt: skip
    log = home / "jupyterlab.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for_server(process, f"http://127.0.0.1:{port}/api?token={token}", log)
        yield process.pid, f"http://127.0.0.1:{port}/lab/tree/{{notebook}}?token={token}"
    finally:
        # Asked nicely JupyterLab ends its kernels, too; they are not in its process group.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_server(process, url, log):
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


class Lab:
    """A JupyterLab and a browser page on it.

    Attributes:
        folder: the copy of notebooks/ that it serves.
        page: playwright's page.
        server_pid: process of the server, the parent of its kernels.
    """

    def __init__(self, folder, page, server_pid, address):
        self.folder = folder
        self.server_pid = server_pid
        self.page = page
        self._address = address

    def open(self, notebook):
        """Open a notebook in a fresh workspace and wait for its kernel."""
        self.page.goto(self._address.format(notebook=notebook) + "&reset")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
        self.page.get_by_text("| Idle").wait_for(timeout=60_000)

    def command(self, name):
        """Run a command of JupyterLab through its palette: keyboard only."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+Shift+C")
        box = self.page.locator(".lm-CommandPalette-input")
        box.wait_for()
        self.page.keyboard.type(name)
        self.page.locator(".lm-CommandPalette-item.lm-mod-active").wait_for()
        self.page.keyboard.press("Enter")

    def run_all(self, timeout_s=240):
        """Run every cell and wait for the last; an error fails the test."""
        self.command("Run All Cells")
        cells = self.page.locator(".jp-CodeCell .jp-InputPrompt")
        end = time.monotonic() + timeout_s
        while True:
            prompts = cells.all_text_contents()
            if prompts and all(re.search(r"\[\d+\]", prompt) for prompt in prompts):
                break
            errors = self.page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_text_contents()
            traceback = next((text for text in errors if "Traceback" in text), None)
            assert traceback is None, traceback
            assert time.monotonic() < end, f"still running after {timeout_s} s: {prompts}"
            self.page.wait_for_timeout(200)

    def picture(self, name, target=None):
        """Keep a screenshot of the page or of a part of it, and return its path."""
        PICTURES.mkdir(exist_ok=True)
        path = PICTURES / f"{name}.png"
        (target or self.page).screenshot(path=path)
        return path


@contextmanager
def open_lab(scratch):
    """JupyterLab on a copy of notebooks/ in an empty folder, open in Chromium; skips where there is no Chromium."""
    chromium = _chromium()
    if chromium is None:
        pytest.skip("there is no Chromium on the PATH (Debian, Ubuntu: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`")
    folder, home = scratch / "checkout" / "notebooks", scratch / "home"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".*"))
    home.mkdir()
    with _server(folder, home) as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            str(scratch / "profile"), executable_path=chromium, headless=True, args=_FLAGS,
            viewport={"width": 1440, "height": 1300},
        )  # fmt: skip
        try:
            yield Lab(folder, browser.pages[0] if browser.pages else browser.new_page(), *server)
        finally:
            browser.close()


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on a copy of notebooks/, open in Chromium."""
    with open_lab(tmp_path) as opened:
        yield opened
