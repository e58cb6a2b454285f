"""Only a browser on this machine that knows the token gets an answer, and only to GET and HEAD."""

import shutil

import pytest

from tests.serve.conftest import RUNS, WITHOUT

pytest.importorskip("starlette", reason=WITHOUT)
pytest.importorskip("httpx", reason=WITHOUT)

from starlette.testclient import TestClient

from paralab.serve.access import is_local
from paralab.serve.app import make_app, new_token

TOKEN = "correct-token"
PAGES = ("/", "/list", "/run?name=ddp", "/frame?name=ddp", "/report?name=ddp", "/assets/serve.js")
EVERY = (*PAGES, "/events/list", "/events/run?name=ddp", "/class?name=.&practical=5", "/missing")


@pytest.fixture
def client(served):
    app, _ = make_app(served, TOKEN, "paralab-1")
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def with_token(path, token=TOKEN):
    return f"{path}{'&' if '?' in path else '?'}token={token}"


@pytest.mark.parametrize("path", EVERY)
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "é"])
def test_every_address_needs_the_token(client, path, token):
    answer = client.get(path if token is None else with_token(path, token))
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert "ddp" not in answer.text


@pytest.mark.parametrize("path", PAGES)
def test_the_token_opens_the_pages_and_sets_the_cookie(client, path):
    answer = client.get(with_token(path))
    assert answer.status_code == 200
    [cookie] = answer.headers.get_list("set-cookie")
    name, *attributes = (part.strip() for part in cookie.split(";"))
    assert name == f"paralab-1={TOKEN}"
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert client.get(path).status_code == 200  # with the cookie alone


@pytest.mark.parametrize(
    ("path", "status"), [("/run?name=gone", 404), ("/report?name=damaged", 422)]
)
def test_a_problem_has_its_styles_and_fits_the_frame_of_a_report(client, served, path, status):
    """The page of a problem had no styles after the printed address, because the cookie was
    missing. In the frame of a report, the browser showed only a broken page."""
    shutil.copytree(RUNS / "ddp", served / "damaged")
    (served / "damaged" / "manifest.json").write_text("{")
    answer = client.get(with_token(path))
    assert answer.status_code == status
    assert client.get("/assets/page.css").status_code == 200  # with the cookie
    framed = "frame-ancestors 'self'" in answer.headers["Content-Security-Policy"]
    assert framed == path.startswith("/report")
    assert ("/assets/" in answer.text) != framed


def test_a_wrong_cookie_is_refused(client):
    for cookie in ("paralab-1=wrong", "paralab-2=" + TOKEN, "paralab-1=", "=;=", "\x00"):
        assert client.get("/", headers={"Cookie": cookie}).status_code == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "192.168.0.2", ""],
)
def test_another_host_name_is_refused(client, host):
    """DNS rebinding: a web page points its own name at 127.0.0.1."""
    answer = client.get(with_token("/"), headers={"Host": host})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


def test_local_host_names_are_accepted():
    assert is_local(["127.0.0.1:8000"])
    assert is_local(["localhost"])
    assert is_local(["LOCALHOST:9999"])  # ssh -L 9999:127.0.0.1:8000
    assert not is_local([])
    assert not is_local(["localhost", "evil.example"])
    assert not is_local(["localhost:80@evil.example"])


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, with_token("/")).status_code == 405
    assert client.request(method, with_token("/missing")).status_code == 405
    assert client.request(method, "/").status_code == 405  # even without the token


@pytest.mark.parametrize("path", [*PAGES, "/events/list", "/missing"])
def test_head_answers_without_a_body(client, path):
    answer = client.head(with_token(path))
    assert answer.status_code == (404 if path == "/missing" else 200)
    assert answer.content == b""


@pytest.mark.parametrize("path", EVERY[:-1])
@pytest.mark.parametrize("allowed", [True, False])
def test_every_answer_has_the_security_headers(client, path, allowed):
    answer = client.head(with_token(path) if allowed else path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_only_the_report_may_run_inline_scripts_and_only_in_a_sandbox(client):
    report = client.get(with_token("/report?name=ddp")).headers["content-security-policy"]
    assert "sandbox allow-scripts" in report
    assert "allow-same-origin" not in report
    page = client.get(with_token("/")).headers["content-security-policy"]
    assert "script-src 'self';" in page


@pytest.mark.parametrize("page", ["run", "frame", "report", "list", "open", "class"])
@pytest.mark.parametrize("name", ["..", "../outside", "/etc", "ddp/../..", "link", "ddp%00"])
def test_no_page_leads_out_of_the_folder(client, served, tmp_path, page, name):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "manifest.json").write_text('{"secret": 1}')
    (served / "link").symlink_to(tmp_path / "outside")
    answer = client.get(with_token(f"/{page}?name={name}&practical=5"))
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_the_token_is_long_and_different_each_time():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32


def test_two_runs_side_by_side_and_a_damaged_one(client, served):
    client.get(with_token("/"))
    both = client.get("/report?name=ddp&name=raised")
    assert both.status_code == 200
    assert "ddp ×2" in both.text
    (served / "raised" / "manifest.json").write_text("{}")
    assert client.get("/report?name=ddp&name=raised").status_code == 422
    assert client.get("/run?name=raised").status_code == 422


def test_serving_writes_nothing(client, served):
    def state():
        return {path: path.stat().st_mtime_ns for path in [served, *served.rglob("*")]}

    before = state()
    for path in EVERY:
        if not path.startswith("/events/list"):
            client.get(with_token(path))
    assert state() == before


def test_names_from_a_folder_cannot_become_markup(client, served):
    evil = "<script>alert(1)</script>'\""
    (served / "ddp").rename(served / evil.replace("/", "\u2215"))
    text = client.get(with_token("/")).text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_a_deleted_run_and_a_new_run_with_its_name(client, served):
    """A follower must not continue in the middle of another run's events."""
    client.get(with_token("/"))
    assert "ddp ×2" in client.get("/run?name=ddp").text
    shutil.rmtree(served / "ddp")
    assert client.get("/run?name=ddp").status_code == 404
    shutil.copytree(RUNS / "hybrid", served / "ddp")
    (served / "ddp" / "manifest.json").touch()
    assert "hybrid ×2" in client.get("/run?name=ddp").text


@pytest.mark.parametrize("name", ["../outside", "link", "missing"])
@pytest.mark.parametrize("page", ["run", "list", "class"])
def test_no_stream_leads_out_of_the_folder(client, served, tmp_path, page, name):
    shutil.copytree(RUNS / "ddp", tmp_path / "outside")
    (served / "link").symlink_to(tmp_path / "outside")
    answer = client.get(with_token(f"/events/{page}?name={name}&practical=5"))
    kinds = [line for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds == ["event: problem"]


def test_a_folder_without_runs_yet_has_an_empty_list(tmp_path):
    """`paralab serve` may start before the first run creates runs/."""
    app, _ = make_app(tmp_path / "runs", TOKEN, "paralab-1")
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert "No runs yet" in client.get(with_token("/")).text
        shutil.copytree(RUNS / "ddp", tmp_path / "runs" / "first")
        assert 'data-name="first"' in client.get("/").text
