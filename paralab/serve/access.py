"""Who may read the pages: a browser on this machine that knows the token.

Other programs can send requests to a local port, and so can any web page that the user visits. So
each request needs the token, in the URL or in the cookie that the first page sets. A `Host` header
with another name means that a web page pointed its own name at this machine (DNS rebinding).
"""

import hmac

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")
METHODS = ("GET", "HEAD")
# Charts have style attributes. Scripts and style sheets come only from this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_TOKEN = "This page needs the token from its address. Open the complete address that `paralab serve` printed.\n"
WRONG_HOST = "This server answers only to the names 127.0.0.1 and localhost.\n"
WRONG_METHOD = "This server answers only GET and HEAD requests: it never changes anything.\n"


class Guard:
    """Rejects requests before they reach the app, and adds the security headers to all answers."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        in_url = self._is_token(request.query_params.get("token", ""))
        refusal = self._refuse(request, in_url)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if in_url and not refusal:  # the browser also needs the cookie to load styles
                    value = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", value)
            await send(message)

        await (refusal or self.app)(scope, receive, send_safely)

    def _refuse(self, request: Request, in_url: bool) -> PlainTextResponse | None:
        if not is_local(request.headers.getlist("host")):
            return PlainTextResponse(WRONG_HOST, 421)
        if request.method not in METHODS:
            return PlainTextResponse(WRONG_METHOD, 405, {"Allow": ", ".join(METHODS)})
        if not in_url and not self._is_token(request.cookies.get(self.cookie, "")):
            return PlainTextResponse(NO_TOKEN, 403)
        return None

    def _is_token(self, given: str) -> bool:
        """Compare in constant time, so that timing does not reveal the token."""
        return hmac.compare_digest(given.encode(), self.token.encode())


def is_local(hosts: list[str]) -> bool:
    """Return whether the request names this machine. `ssh -L` forwards from any port."""
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].partition(":")
    return name.lower() in HOSTS and (not port or port.isdecimal())
