"""The pages in a real browser: a live run with two ranks, a killed run, a damaged one, 200 runs.

All tests share one server, as one user's browser does. Needs Playwright and a Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE_SECONDS, ROOT, check_schema, wait_until
from tests.launch.test_endings import SLOW
from tests.serve.conftest import RUNS, WITHOUT
from tests.serve.test_class_table import make_practical

pytest.importorskip("uvicorn", reason=WITHOUT)

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
COPIES = 200
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 finished runs, a comparison, a damaged run, and a run with a link out of the folder."""
    root = tmp_path_factory.mktemp("lab") / "runs"
    for number in range(COPIES):
        shutil.copytree(RUNS / ("ddp" if number % 2 else "dp"), root / f"run{number:03}")
    for name in ("low_precision", "raised"):
        shutil.copytree(RUNS / name, root / name)
    shutil.copytree(RUNS / "ddp", root / "damaged")
    (root / "damaged" / "manifest.json").write_text('{"schema": 2, "pl')
    shutil.copytree(RUNS / "ddp", root / "linked")
    (root / "linked" / "events" / "rank0.jsonl").unlink()
    (root / "linked" / "events" / "rank0.jsonl").symlink_to("/etc/passwd")
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[dict[str, Any]]:
    """`paralab serve`, until Ctrl-C ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paralab", "serve", str(folder), "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    check_schema(["serve"], line)
    yield json.loads(line)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.fixture
def open_page(browser: Any, server: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Open the printed address, then a page. A script error or a refused request fails the test."""
    wrong: list[str] = []
    with browser.new_context(viewport=DESK) as context:
        context.set_default_timeout(DEADLINE_SECONDS * 1000)

        def visit(path: str = "") -> Any:
            page = context.new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda message: wrong.append(message.text))
            page.goto(server["url"])
            if path:
                page.goto(f"http://127.0.0.1:{server['port']}{path}")
            return page

        yield visit
        assert [each for each in wrong if "status of 503" not in each] == []


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def check_accessibility(page: Any) -> None:
    """The page's policy forbids eval, so run axe as a script of a new page without the policy."""
    from axe_playwright_python.sync_playwright import Axe

    with page.context.browser.new_context(viewport=DESK, bypass_csp=True) as context:
        context.add_cookies(page.context.cookies())
        copy = context.new_page()
        copy.goto(page.url)
        found = Axe().run(copy).response
    assert len(found["passes"]) > 15  # it checked something
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []


def pids_of(run: Path) -> list[int]:
    lines = [path.read_text().partition("\n")[0] for path in (run / "events").iterdir()]
    return [json.loads(line)["pid"] for line in lines]


def test_the_list_shows_200_runs_and_the_reasons_for_bad_folders(open_page):
    page = open_page()
    rows = page.locator("#rows > tr")
    assert rows.count() == COPIES + 4
    assert "token" not in page.url  # it moved to the cookie
    check_accessibility(page)
    for name, words in (("damaged", "manifest.json is damaged"), ("linked", "points outside")):
        row = page.locator(f'tr[data-name="{name}"]')
        assert row.locator(".badge").inner_text() == "damaged"
        assert words in row.locator(".reason").inner_text()
        assert row.locator("a").count() == 0

    overflow = "(box) => box.scrollWidth - box.clientWidth"
    assert page.locator(".scroll").evaluate(overflow) == 0  # the loss was cut off
    page.locator("#filter").fill("raised")
    assert page.locator("#rows > tr:visible").count() == 1
    page.locator("#filter").fill("")
    page.set_viewport_size(PHONE)
    assert fits(page)


def test_two_selected_runs_are_compared_with_the_keyboard_alone(open_page):
    page = open_page()
    assert page.locator("#compare").is_disabled()
    for name in ("run001", "run002"):
        box = page.locator(f'tr[data-name="{name}"] input')
        box.focus()
        page.keyboard.press("Space")
    page.locator("#compare").focus()
    page.keyboard.press("Enter")
    report = page.frame_locator("iframe")
    report.locator("h1").wait_for()
    page.wait_for_load_state()
    table = report.locator("table").first.inner_text()
    assert "ddp ×2" in table
    assert "dp ×2" in table
    assert page.locator("nav a.home").get_attribute("href") == "/"


def test_a_comparison_opens_its_report_and_lists_its_runs(open_page):
    page = open_page()
    page.locator('tr[data-name="low_precision"] a').click()
    assert "mlp:tiny" in page.frame_locator("iframe").locator("h1").inner_text()
    check_accessibility(page)
    page.locator("nav a", has_text="low_precision").click()
    wait_until(lambda: page.locator("#rows > tr").count() == 6)


def test_a_page_without_the_cookie_shows_nothing(browser, server):
    with browser.new_context() as stranger:
        answer = stranger.new_page().goto(f"http://127.0.0.1:{server['port']}/")
        assert answer.status == 403


def test_a_lost_connection_is_reported_and_recovers(open_page):
    page = open_page()
    page.route("**/events/**", lambda route: route.fulfill(status=503))
    page.reload()
    wait_until(lambda: "lost" in page.locator("#connection").get_attribute("class"))
    with page.expect_request("**/events/**"):
        pass  # it tries again
    page.unroute("**/events/**")
    wait_until(lambda: page.locator("#connection").inner_text() == "updating")
    assert "lost" not in page.locator("#connection").get_attribute("class")


def test_a_teacher_sees_the_class(open_page, folder):
    for student in ("ada", "bob"):
        make_practical(folder / "class" / student)
        (folder / "class" / student / "sheet.md").write_text("nothing")
    page = open_page()
    page.locator("#classes a").click()
    wait_until(lambda: page.locator("#grades tbody tr").count() == 2)
    (folder / "class" / "cyd").mkdir()  # hands in later
    wait_until(lambda: page.locator("#grades tbody tr").count() == 3)
    assert page.locator("#grades tbody th").all_inner_texts() == ["ada", "bob", "cyd"]
    check_accessibility(page)
    shutil.rmtree(folder / "class")


@pytest.fixture
def training(folder: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start `paralab run` in the folder's parent, as in another terminal."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        # Its steps wait, because fast ranks would take the CPU time of the browser.
        (folder.parent / "slow.py").write_text(SLOW)
        workload = "--workload slow.py:workload --steps 20000"
        command = f"run ddp --replicas 2 {workload} --out runs/live".split()
        process = subprocess.Popen(
            [sys.executable, "-m", "paralab", *command],
            cwd=folder.parent,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_live_run_appears_is_followed_and_is_shown_as_killed(open_page, training, folder):
    listing = open_page()
    box = listing.locator('tr[data-name="run007"] input')
    box.check()
    process = training()
    row = listing.locator('tr[data-name="live"]')
    wait_until(lambda: row.count() and row.locator(".badge").inner_text() == "running")
    assert box.is_checked()  # new rows do not change the selection
    assert box.evaluate("(box) => box === document.activeElement")

    page = open_page("/run?name=live")

    def step() -> int:
        return int(page.locator("#status progress").get_attribute("value"))

    wait_until(step)
    first = step()
    wait_until(lambda: step() > first + 20)
    assert page.locator("#status .badge").inner_text() == "running"
    assert page.locator("#connection").inner_text() == "updating"
    assert page.locator("#ranks tbody tr").count() == 2
    assert page.locator("#ranks td:nth-child(2)").all_inner_texts()[0].startswith("running")
    for chart in ("losses", "step_times", "timeline"):
        wait_until(lambda chart=chart: page.locator(f"#{chart} svg.wide").is_visible())
    wait_until(lambda: "rank 1 · cpu:1" in page.locator("#timeline svg.wide").text_content())

    for pid in (process.pid, *pids_of(folder / "live")):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: page.locator("#status .badge").inner_text() == "killed")
    assert "did not record an end" in page.locator("#status .sentence").inner_text()
    check_accessibility(page)
    assert page.locator("#ranks td:nth-child(2)").all_inner_texts() == ["gone", "gone"]
    wait_until(lambda: row.locator(".badge").inner_text() == "killed")
    page.set_viewport_size(PHONE)
    assert fits(page)
    assert page.locator("#losses svg.narrow").is_visible()


def test_a_run_that_ends_while_its_page_is_open(open_page, folder):
    """The stream ends with the run, and the page says how it ended."""
    run = folder / "growing"
    shutil.copytree(RUNS / "ddp", run)
    files = sorted((run / "events").iterdir())
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content[: len(content) // 2])
        later = time.time() + 3600  # the run is never silent, so it may still train
        os.utime(path, (later, later))
    page = open_page("/run?name=growing")
    assert page.locator("#status .badge").inner_text() == "running"
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    wait_until(lambda: page.locator("#status .badge").inner_text() == "completed")
    assert page.locator("#status .sentence").inner_text() == "Completed all 6 steps."
    wait_until(lambda: page.locator("#connection").inner_text() == "")
    assert "W01" in page.locator("#findings").inner_text()
