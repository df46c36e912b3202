"""What MLflow's own pages show of a finished study, in a real browser: its trials, what differs, their pictures."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import URLError

import pytest
from PIL import Image

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.files import read_json
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.studies import references

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

TINY = (
    "classifier.epochs=1",
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "segmenter.channels=24",
    "pseudo_masks.smallest=0",
    "report.panels=2",
    "compute.threads=1",
    "compute.stop_if_nothing_is_learnt=false",
)


class Served(NamedTuple):
    """A workspace with a finished study, and the address of MLflow's pages on it."""

    workspace: Workspace
    address: str

    def run_id(self, name: str) -> str:
        return str(read_json(self.workspace.run(name).path / "mlflow.json")["run_id"])


@pytest.fixture(scope="module")
def served(ray_local: None, browser: "Chrome", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A study of related images, and `mcis ui` on its workspace; behind `browser`, which may skip the test."""
    root, workspace = tmp_path_factory.mktemp("data") / "VOC2012", tmp_path_factory.mktemp("workspace")
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    references(resolve("voc", "small", options, TINY), workspace, "study", seeds=1, until="pseudo_masks", parallel=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mcis.platform.cli", "ui", "--workspace", str(workspace), "--port", str(port)]
    log = workspace / "ui.log"
    with log.open("w") as out:
        environment = os.environ | {"MLFLOW_WORKERS": "1"}
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)
    address = f"http://127.0.0.1:{port}/"
    try:
        until(browser, lambda: server.poll() is not None or answers(address))
        assert server.poll() is None, log.read_text()
        yield Served(Workspace(workspace), address)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # on a plain end it would wait for the browser's connections
        server.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def until(browser: "Chrome", found: Callable[[], Any]) -> Any:
    """Waits for what a page that is still being made has: anything that is true."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 120, ignored_exceptions=[StaleElementReferenceException]).until(lambda _: found())


def open_page(browser: "Chrome", served: Served, page: str) -> None:
    browser.get("about:blank")  # another fragment alone would not load the page anew
    browser.get(f"{served.address}#/{page}")


@pytest.mark.slow
def test_trials_are_listed_below_their_study(browser: "Chrome", served: Served) -> None:
    browser.get_log("performance")
    open_page(browser, served, "experiments/1/runs")
    names = "return [...document.querySelectorAll('.ag-pinned-left-cols-container a')].map((link) => link.textContent)"
    until(browser, lambda: "study" in browser.execute_script(names))
    assert "study-r0-s0" not in browser.execute_script(names)
    browser.find_element("css selector", ".ag-pinned-left-cols-container button").click()
    trials = {f"study-r{related}-s0" for related in range(6)}
    until(browser, lambda: trials <= set(browser.execute_script(names)))
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert urls
    assert not [url for url in urls if url.startswith("http") and not url.startswith(served.address)]


@pytest.mark.slow
def test_two_trials_differ_in_the_parameter_that_was_varied(browser: "Chrome", served: Served) -> None:
    ids = [served.run_id(f"study-r{related}-s0") for related in (1, 3)]
    open_page(browser, served, f'compare-runs?runs={json.dumps(ids)}&experiments=["1"]')
    label = "Parameters - Show diff only"
    switches = until(browser, lambda: browser.find_elements("css selector", f'button[aria-label="{label}"]'))
    browser.execute_script("arguments[0].click()", switches[0])
    rows = """return [...document.querySelectorAll(".mlflow-compare-run-table")]
        .map((table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent)));"""
    # The case and the short name of what was varied stand beside its key.
    differing = [["case", "r1", "r3"], ["localize.related", "1", "3"], ["related", "1", "3"]]
    until(browser, lambda: differing in map(sorted, browser.execute_script(rows)))


@pytest.mark.slow
def test_the_pictures_and_the_report_of_a_trial_are_shown(browser: "Chrome", served: Served) -> None:
    artifacts = f"experiments/1/runs/{served.run_id('study-r3-s0')}/artifacts"
    open_page(browser, served, f"{artifacts}/pictures/gallery.png")
    size = """const shown = document.querySelector('img[alt="pictures/gallery.png"]');
        return shown && shown.naturalWidth ? [shown.naturalWidth, shown.naturalHeight] : null;"""
    with Image.open(served.workspace.run("study-r3-s0").pictures / "gallery.png") as gallery:
        assert tuple(until(browser, lambda: browser.execute_script(size))) == gallery.size

    open_page(browser, served, f"{artifacts}/report.html")
    frame = until(browser, lambda: browser.find_elements("css selector", "iframe.mlflow-html-iframe"))[0]
    browser.switch_to.frame(frame)
    try:
        ready = "const made = document.getElementById('explore'); return made !== null && 'ready' in made.dataset"
        until(browser, lambda: browser.execute_script(ready))
        assert browser.find_element("tag name", "h1").text == "study-r3-s0"
        at = browser.find_element("id", "explore-at").text
        browser.find_element("id", "explore-threshold").send_keys("\ue014")  # the right arrow key
        until(browser, lambda: browser.find_element("id", "explore-at").text != at)
    finally:
        browser.switch_to.default_content()
