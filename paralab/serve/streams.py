"""Server-sent events: the parts of a page that changed, at most four times a second.

Each event contains complete parts, so a browser that reconnects continues with the current state.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping

import anyio
from anyio import to_thread

from paralab.serve.problem import EXPECTED, explain

Parts = Mapping[str, object]  # the element's id -> its new content
TICK_SECONDS = 0.25
HEARTBEAT_SECONDS = 10.0
RETRY_MILLISECONDS = 1000  # the browser waits this long before it reconnects


async def stream(
    read: Callable[[], tuple[Parts, bool]],
    is_stopping: Callable[[], bool],
    tick_seconds: float = TICK_SECONDS,
) -> AsyncIterator[str]:
    """Send the parts that changed until `read` says that they are final."""
    sent: dict[str, object] = {}
    number, quiet_seconds = 0, 0.0
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    while not is_stopping():
        try:
            parts, is_over = await to_thread.run_sync(read)
        except EXPECTED as error:
            yield event("problem", number, {"text": explain(error)})
            return
        changed = {name: part for name, part in parts.items() if sent.get(name) != part}
        if changed:
            number, quiet_seconds = number + 1, 0.0
            sent |= changed
            yield event("parts", number, changed)
        if is_over:
            yield event("over", number, {})
            return
        if quiet_seconds >= HEARTBEAT_SECONDS:
            quiet_seconds = 0.0
            yield ": still here\n\n"
        await anyio.sleep(tick_seconds)
        quiet_seconds += tick_seconds


def event(kind: str, number: int, data: Parts) -> str:
    """Format an event. JSON does not contain line breaks, which would end the data."""
    return f"event: {kind}\nid: {number}\ndata: {json.dumps(data)}\n\n"
