"""Photograph the page of ``ciuic web`` over a real run, in a real browser.

Run as root from a checkout: ``.venv/bin/python docs/pictures/make_page.py``. A program that stands for a training writes checkpoints and a log of
its numbers into a protected directory, goes astray, and is killed while it saves; the pictures page-*.png are what a browser shows then. Nothing
is edited afterwards. Needs playwright and chromium, as the tests of the page do.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from make import CIUIC, STATE, TOP, TRAINING, environment, snapshot, train
from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parent
ADDRESS = "127.0.0.1:8479"
_TRAINER = """
import os, signal, sys, time
sys.stdout.write("started\\n"); sys.stdout.flush()
time.sleep(3600)
"""


def log_numbers(first: int, last: int, *, spike: bool = False) -> None:
    """Write the numbers of the steps between two checkpoints."""
    chance = random.Random(first)
    with open(TRAINING / "metrics.jsonl", "a") as log:
        for step in range(first, last, 20):
            loss = 1.6 + 4.4 * math.exp(-step / 1500) + chance.gauss(0, 0.04)
            norm = 1 + chance.gauss(0, 0.06)
            if spike:
                far = (step - first) / (last - first)
                loss += 2.2 * math.exp(-4 * far)
                norm += 5 * math.exp(-6 * far)
            log.write(json.dumps({"step": step, "loss": round(loss, 4), "grad_norm": round(norm, 4)}) + "\n")


def run_training() -> None:
    """Write what a training would until it is killed in the middle of a save."""
    (TRAINING / "config.yaml").write_text("learning_rate: 3.0e-4\nseed: 1234\nmodel: tiny-7m\n")
    for step in (1000, 2000, 3000, 4000):
        log_numbers(step - 1000, step)
        train(step)
        snapshot()
    (TRAINING / "config.yaml").write_text("learning_rate: 3.0e-3\nseed: 1234\nmodel: tiny-7m\n")
    STATE["layers.2.mlp.weight"] += (
        np.random.default_rng(1).normal(0, 0.05, STATE["layers.2.mlp.weight"].shape).astype("f4")
    )
    log_numbers(4000, 5000, spike=True)
    train(5000)
    snapshot()
    log_numbers(5000, 5400)
    whole = TRAINING / "checkpoints/step-5000.safetensors"
    trainer = subprocess.Popen(
        [*CIUIC, "watch", "--name", "tiny-7m", "--", sys.executable, "-c", _TRAINER],
        env=environment(), cwd="/", stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert trainer.stdout is not None
    trainer.stdout.readline()
    torn = open(TRAINING / "checkpoints/step-6000.safetensors", "wb")
    torn.write(whole.read_bytes()[: 5 << 20])
    torn.flush()
    child = int(Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()[0])
    os.kill(child, 9)
    trainer.wait(60)
    torn.close()
    subprocess.run([*CIUIC, "drill"], env=environment(), check=False, capture_output=True)
    # Until the emergency snapshot is stored, and the daemon has judged all checkpoints.
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        listed = subprocess.run(
            [*CIUIC, "list"], env=environment(), check=True, capture_output=True, text=True
        ).stdout
        if "emergency" in listed and "TORN" in listed:
            return
        time.sleep(1)
    raise SystemExit("the daemon took no emergency snapshot, or judged none:\n" + listed)


def main() -> None:
    """Play the run, and photograph the page."""
    shutil.rmtree(TOP, ignore_errors=True)
    TOP.mkdir()
    TRAINING.mkdir()  # an error if somebody has a directory of this name
    (TOP / "ciuic.toml").write_text(
        f'[repository]\npath = "{TOP}/repository"\n[daemon]\nruntime_dir = "{TOP}/run"\n'
        f'[[root]]\npath = "{TRAINING}"\n[web]\nactions = true\n'
        f'[[watch_number]]\nfile = "{TRAINING}/metrics.jsonl"\nkey = "loss"\n'
    )
    os.environ["XDG_STATE_HOME"] = str(TOP / "state")
    processes = []
    with open(TOP / "log", "wb") as log:
        try:
            processes.append(
                subprocess.Popen([*CIUIC, "daemon"], env=environment(), cwd="/", stdout=log, stderr=log)
            )
            while subprocess.run(
                [*CIUIC, "status"], env=environment(), capture_output=True, check=False
            ).returncode:
                time.sleep(0.2)
            run_training()
            processes.append(
                subprocess.Popen(
                    [*CIUIC, "web", "--listen", ADDRESS], env=environment(), cwd="/", stdout=log, stderr=log
                )
            )
            while (
                link := subprocess.run(
                    [*CIUIC, "web", "--login"], env=environment(), capture_output=True, text=True
                )
            ).returncode:
                time.sleep(0.5)
            visit(link.stdout.strip())
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(90)
            shutil.rmtree(TRAINING)
            shutil.rmtree(TOP)


def visit(link: str) -> None:
    """Photograph each page: at a desk by day, the overview by night and on a telephone as well."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1280, "height": 800}, timezone_id="UTC")
        page = context.new_page()
        page.goto(link)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_selector("h2")
        top = f"http://{ADDRESS}"
        file = f"{TRAINING}/checkpoints"
        for name, target in (
            ("overview", "/"),
            ("files", f"/files?p={file}"),
            ("training", "/training"),
            ("changes", "/changes"),
            ("drills", "/drills"),
        ):
            page.goto(top + target)
            page.wait_for_timeout(1500)
            page.screenshot(path=str(PICTURES / f"page-{name}.png"), full_page=True)
        page.goto(f"{top}/versions?p={file}/last.safetensors")
        page.locator("main").get_by_role("link", name="Compare").first.click()
        page.wait_for_timeout(4000)
        page.screenshot(path=str(PICTURES / "page-compare.png"), full_page=True)
        shutil.rmtree(TRAINING / "checkpoints")
        page.goto(f"{top}/files?p={file}")
        page.get_by_role("link", name="Restore").first.click()
        page.get_by_role("button", name="Show the plan").click()
        page.wait_for_selector("h1")
        page.screenshot(path=str(PICTURES / "page-plan.png"), full_page=True)
        page.goto(top)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(1000)
        page.screenshot(path=str(PICTURES / "page-overview-dark.png"), full_page=True)
        page.set_viewport_size({"width": 360, "height": 740})
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(500)
        page.screenshot(path=str(PICTURES / "page-overview-360.png"), full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
