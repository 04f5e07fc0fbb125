import json
import os
import signal
import subprocess
import sys
import time

from moe_lab.steps import step

# Kept by its author for ever: the last line of the file never ends.
ENDLESS = step("s0_baseline").source + "\nwhile True:\n    pass\n"

PARENT = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "moe_lab.stopwatch"], stdin=subprocess.PIPE, start_new_session=True)
child.stdin.write(json.dumps({request}).encode())
child.stdin.close()
print(child.pid, flush=True)
child.wait()
"""


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_kernel_leaves_no_configuration_running():
    request = {"source": ENDLESS, "name": "endless.py", "case": 1, "routing": "balanced"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("{request}", json.dumps(request))], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    try:
        time.sleep(2)
        assert _alive(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while _alive(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _alive(child)
    finally:
        parent.stdout.close()
        if _alive(child):
            os.killpg(child, signal.SIGKILL)
