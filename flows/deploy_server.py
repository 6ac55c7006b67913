"""The objects of a Prefect server that `rollart deploy` makes: found by name, made, changed and removed.

Prefect's client has the settings, the credentials and the retries; the bodies are those of its HTTP API.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from flows.deploy_plan import Found, Kind, Made, Step, is_marked, merged_schedules
from flows.server import answering_api
from tasks.errors import UserError

LEDGER = "rollart_deploy"  # the Prefect variable with the names of what deploy made
_HUNG = "a server on SQLite can hang when an automation is written (PrefectHQ/prefect issue 23055): restart it, and "
PAGE = 200  # the most that the API gives at once


@dataclass(frozen=True)
class _Route:
    """Paths of one kind: to create, to find by (the parts of) its name, to change or remove by id or name."""

    create: str
    find: str
    one: str
    change: str = "PATCH"


_ROUTES: dict[Kind, _Route] = {
    "secret": _Route(
        "/block_documents/",
        "/block_types/slug/secret/block_documents/name/{0}",
        "/block_documents/{id}",
    ),
    "work pool": _Route("/work_pools/", "/work_pools/{0}", "/work_pools/{0}"),
    "queue": _Route("/work_pools/{0}/queues", "/work_pools/{0}/queues/{1}", "/work_pools/{0}/queues/{1}"),
    "limit": _Route("/v2/concurrency_limits/", "/v2/concurrency_limits/{0}", "/v2/concurrency_limits/{id}"),
    "flow": _Route("/flows/", "/flows/name/{0}", "/flows/{id}"),
    "deployment": _Route("/deployments/", "/deployments/name/{0}/{1}", "/deployments/{id}"),
    "automation": _Route("/automations/", "", "/automations/{id}", "PUT"),
}


class Server:
    """A Prefect server's API, asked synchronously."""

    def __init__(self, url: str, client: Any):
        self.url, self._client = url, client

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer, None for an empty one. Raises UserError with what the server says."""
        from prefect.exceptions import PrefectHTTPStatusError

        try:
            answer = self._client.request(method, path, **({} if body is None else {"json": body}))
        except PrefectHTTPStatusError as error:
            raise _refused(method, path, error.response) from None
        except httpx.HTTPError as error:
            raise UserError(
                "PREFECT_API_URL",
                f"{self.url} stopped to answer ({error!r})",
                f"{_HUNG if path.startswith('/automations') else ''}do it again when it is back: what is done stays",
            ) from None
        return answer.json() if answer.content else None

    def find(self, kind: Kind, name: str) -> Found | None:
        """The object of that name, or None."""
        if kind == "automation":
            return self._automation(name)
        return self.get(_path(_ROUTES[kind].find, kind, name))

    def _automation(self, name: str) -> Found | None:
        """Names of automations are not unique: one whose answer got lost is made again by the client's retry."""
        named = self.request("POST", "/automations/filter", {"automations": {"name": {"any_": [name]}}})
        first, again = next(iter(named), None), [found["id"] for found in named[1:] if is_marked(found)]
        return {**first, "again": again} if first and again else first

    def get(self, path: str) -> Found | None:
        """What is at `path`; None if nothing is."""
        try:
            return self.request("GET", path)
        except _NotFound:
            return None

    def all(self, path: str, body: dict[str, Any] | None = None) -> list[Found]:
        """All objects of a filter route, however many."""
        found: list[Found] = []
        while len(page := self.request("POST", path, {**(body or {}), "limit": PAGE, "offset": len(found)})):
            found += page
            if len(page) < PAGE:
                break
        return found

    def apply(self, step: Step) -> None:
        """Do what a step says."""
        if step.action in ("update", "remove"):
            for twin in (step.found or {}).get("again", ()):
                self.request("DELETE", f"/automations/{twin}")
        if step.action == "create":
            self._create(step)
        elif step.action == "update":
            self._update(step)
        elif step.action == "remove":
            self.request("DELETE", _path(_ROUTES[step.kind].one, step.kind, step.name, step.found))

    def _create(self, step: Step) -> None:
        if step.kind == "secret":
            from prefect.blocks.system import Secret

            Secret(value=secrets.token_urlsafe(32)).save(step.name)  # type: ignore[arg-type]
            return
        body = step.body
        if step.kind == "deployment":
            flow = self.find("flow", step.name.partition("/")[0]) or {}
            body = {**body, "flow_id": flow["id"]}
        self.request("POST", _path(_ROUTES[step.kind].create, step.kind, step.name), body)

    def _update(self, step: Step) -> None:
        body, found, route = dict(step.body), step.found or {}, _ROUTES[step.kind]
        if "schedules" in body:
            body["schedules"] = merged_schedules(body["schedules"], found["schedules"])
        if route.change == "PUT":  # takes whole objects; whether it is switched on stays a person's decision
            kept = {key: found[key] for key in ("name", "description", "enabled", "trigger", "actions")}
            body = {**kept, **body}
        self.request(route.change, _path(route.one, step.kind, step.name, step.found), body)

    def made(self) -> Made:
        """What earlier deploys made."""
        ledger = (self.get(f"/variables/name/{LEDGER}") or {}).get("value") or {}
        return {(kind, name) for kind, names in ledger.items() for name in names}

    def remember(self, made: Made) -> None:
        """Keep what deploys made. Before they make it: a deploy that was interrupted knows its own again."""
        if made == self.made():
            return
        path = f"/variables/name/{LEDGER}"
        if not made:
            self.request("DELETE", path)
            return
        names: dict[str, list[str]] = {}
        for kind, name in sorted(made):
            names.setdefault(kind, []).append(name)
        if self.get(path) is None:
            body = {"name": LEDGER, "value": names, "tags": ["rollart"]}
            self.request("POST", "/variables/", body)
        else:
            self.request("PATCH", path, {"value": names})


class _NotFound(UserError):
    """There is no such object."""


def _refused(method: str, path: str, response: httpx.Response) -> UserError:
    try:
        said = response.json().get("detail") or response.text
    except ValueError:
        said = response.text
    problem = f"{method} {path}: {response.status_code} {said if isinstance(said, str) else json.dumps(said)}"
    if response.status_code == 404:
        return _NotFound("Prefect", problem[:500], "create it: rollart deploy")
    if response.status_code in (401, 403):
        return UserError(
            "PREFECT_API_KEY", problem[:500], "set it, or PREFECT_API_AUTH_STRING, to one that may"
        )
    return UserError("Prefect", problem[:500], "see the server's log")


def _path(template: str, kind: Kind, name: str, found: Found | None = None) -> str:
    parts = name.split("/") if kind in ("queue", "deployment") else [name]
    return template.format(*(quote(part, safe="") for part in parts), id=(found or {}).get("id"))


@contextmanager
def connected() -> Iterator[Server]:
    """The configured server. Raises UserError without one, or if it does not answer within seconds."""
    url = answering_api()
    from prefect import get_client

    with get_client(sync_client=True) as client:
        yield Server(url, client)
