"""The routes: pages, their streams, and their assets. Nothing here writes a file."""

import secrets
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from paralab.analyse.manifest import kind_of
from paralab.serve import pages
from paralab.serve.access import Guard
from paralab.serve.class_table import ClassTable, find_classes
from paralab.serve.live_run import LiveRun
from paralab.serve.problem import EXPECTED, explain
from paralab.serve.runs import Listing, Row
from paralab.serve.safe_path import NotServed, find_folder, open_folder
from paralab.serve.status import IS_OVER
from paralab.serve.streams import Parts, stream
from paralab.show.open_folder import document_of, document_of_runs
from paralab.show.page import render as render_report

LIST_SECONDS = 1.0  # time between two reads of the folder
MOST_OPEN = 32  # how many runs, listings, and classes stay in memory
# The report is a complete page with its own script. It runs without access to the other pages.
REPORT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'; sandbox allow-scripts"
}


class Site:
    """Answers requests about one folder. The viewers of a run share its follower."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_stopping = False
        shared = lru_cache(MOST_OPEN)
        self._live_run = shared(lambda name, written: LiveRun(root, name))
        self._listing = shared(lambda folder: Listing(root, folder))
        self.class_table = shared(lambda name, practical: ClassTable(root, name, practical))

    def run(self, name: str) -> LiveRun:
        """Return the follower of a run. A new run in a folder with the same name gets a new
        follower."""
        manifest = find_folder(self.root, name) / "manifest.json"
        return self._live_run(name, manifest.lstat().st_mtime_ns if manifest.exists() else 0)

    def rows(self, name: str) -> list[Row]:
        """List the runs under a folder, or the runs of one experiment."""
        return self._listing(find_folder(self.root, name) if name else None).read()

    # --- what a stream sends: the parts, and whether they are final ---

    def list_state(self, name: str) -> tuple[Parts, bool]:
        rows = self.rows(name)
        classes = [] if name else find_classes(self.root, rows)
        fragment = pages.render("classes", classes=classes)
        return {**pages.list_parts(rows, name), "classes": fragment}, False

    def run_state(self, name: str) -> tuple[Parts, bool]:
        snapshot = self.run(name).update()
        return pages.run_parts(snapshot), snapshot.status in IS_OVER

    def class_state(self, name: str, practical: str) -> tuple[Parts, bool]:
        table = self.class_table(name, practical)
        table.grade_next()
        return pages.class_parts(table), False

    # --- pages ---

    def list_page(self, request: Request) -> str:
        name = request.query_params.get("name", "")
        parts, _ = self.list_state(name)
        return pages.render("list", folder=str(self.root), name=name, parts=parts)

    def run_page(self, request: Request) -> str:
        name = _name(request)
        snapshot = self.run(name).update()
        parts = pages.run_parts(snapshot)
        return pages.render("run", name=name, run=snapshot, parts=parts)

    def class_page(self, request: Request) -> str:
        name, practical = _name(request), request.query_params.get("practical", "")
        table = self.class_table(name, practical)
        return pages.render("class", name=name, practical=practical, parts=pages.class_parts(table))

    def open(self, request: Request) -> Response:
        """Redirect from a report to its run, or to the runs of its experiment."""
        name = _name(request)
        kind = kind_of(open_folder(self.root, name))
        return RedirectResponse(pages.link("run" if kind == "run" else "list", name=name), 303)

    def frame_page(self, request: Request) -> str:
        """Show the report of one folder, or of several runs side by side, in a frame."""
        self._folders(request)
        return pages.render("frame", names=request.query_params.getlist("name"))

    def report_page(self, request: Request) -> str:
        folders = self._folders(request)
        several = len(folders) > 1
        return render_report(document_of_runs(folders) if several else document_of(folders[0]))

    def _folders(self, request: Request) -> list[Path]:
        names = request.query_params.getlist("name")
        if not names:
            raise NotServed("Which run?", fix="select runs in the list")
        return [open_folder(self.root, name) for name in names]


def make_app(root: Path, token: str, cookie: str) -> tuple[Starlette, Site]:
    site = Site(root)

    def page(
        make: Callable[[Request], str | Response], problem: str = "problem", **headers: str
    ) -> Callable[..., object]:
        async def answer(request: Request) -> Response:
            return await to_thread.run_sync(partial(_answer, make, request, problem, headers))

        return answer

    def events(
        read: Callable[..., tuple[Parts, bool]], *names: str, tick: float
    ) -> Callable[..., object]:
        async def answer(request: Request) -> Response:
            if request.method == "HEAD":
                return Response(media_type="text/event-stream")
            values = [request.query_params.get(name, "") for name in names]
            content = stream(partial(read, *values), lambda: site.is_stopping, tick)
            return StreamingResponse(content, media_type="text/event-stream")

        return answer

    routes = [
        Route("/", page(site.list_page)),
        Route("/list", page(site.list_page)),
        Route("/run", page(site.run_page)),
        Route("/class", page(site.class_page)),
        Route("/frame", page(site.frame_page)),
        Route("/open", page(site.open)),
        Route("/report", page(site.report_page, "report_problem", **REPORT_HEADERS)),
        Route("/events/list", events(site.list_state, "name", tick=LIST_SECONDS)),
        Route("/events/run", events(site.run_state, "name", tick=0.25)),
        Route("/events/class", events(site.class_state, "name", "practical", tick=0.25)),
        Route("/assets/{name}", _asset),
    ]
    guard = Middleware(Guard, token=token, cookie=cookie)
    return Starlette(routes=routes, middleware=[guard]), site


def new_token() -> str:
    return secrets.token_urlsafe(24)


def _name(request: Request) -> str:
    return str(request.query_params.get("name", ""))


def _answer(
    make: Callable[[Request], str | Response],
    request: Request,
    problem: str,
    headers: dict[str, str],
) -> Response:
    """Return the page or, if the folder cannot be shown, a page that says why."""
    try:
        made = make(request)
        return made if isinstance(made, Response) else HTMLResponse(made, headers=headers)
    except EXPECTED as error:
        status = 404 if isinstance(error, NotServed) else 422
        return HTMLResponse(pages.render(problem, problem=explain(error)), status, headers)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in (pages.SCRIPT, *pages.STYLES):
        return PlainTextResponse("Not found\n", 404)
    kind = "text/javascript" if name == pages.SCRIPT else "text/css"
    return Response(pages.asset(name), media_type=kind)
