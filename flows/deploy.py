"""`rollart deploy` and `rollart undeploy`: read the server, print a plan, do it, print what stands.

What imports Prefect is imported once the server has answered, so that a wrong address is told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from flows import deploy_plan
from flows.deploy_plan import SHARED, Found, Key, Made, Step, is_marked
from flows.deploy_server import Server, connected
from hardware.pools import Pool
from tasks.errors import UserError

Say = Callable[[str], None]
RAN = {"flow_runs": {"state": {"type": {"not_any_": ["SCHEDULED"]}}}}
ONLINE = {"workers": {"status": {"any_": ["ONLINE"]}}}


def deploy(pools: str, teams: Iterable[str], notify: str | None, dry_run: bool, say: Say) -> None:
    """Make everything stand on the configured server. Raises UserError before anything is changed."""
    chosen, quotas = deploy_plan.read_pools(pools), deploy_plan.read_teams(teams)
    with connected() as server:
        block = notification_block(server, notify) if notify else None
        made = server.made()
        steps = deploy_plan.steps_to(deploy_plan.wanted(chosen, quotas, block), server.find, made)
        say(show_steps(steps, server.url))
        if not notify and ("automation", deploy_plan.REPORT) not in made:
            say("No automation reports failed runs: give it a notification block with --notify TYPE/NAME.")
        if dry_run:
            return
        server.remember(made | {step.key for step in steps if _becomes_ours(step)})
        for step in steps:
            server.apply(step)
        say("\n" + show_pools(server, chosen))


def undeploy(pools: str | None, dry_run: bool, say: Say) -> None:
    """Remove what deploy made, of the pools of one set or all of it. Raises UserError for a wrong set or server."""
    only = None if pools is None else deploy_plan.read_pools(pools)
    with connected() as server:
        made = server.made()
        steps = removal(server, made, only)
        if not steps:
            say(f"Nothing on {server.url} was made by rollart deploy{' for these pools' if pools else ''}.")
        else:
            say(show_steps(steps, server.url))
        if dry_run:
            return
        for step in steps:
            server.apply(step)
        kept = {step.key for step in steps if step.action == "keep" and step.kind != "flow"}
        rest = set() if only is None else made - {step.key for step in steps}
        server.remember(rest | kept)


def _becomes_ours(step: Step) -> bool:
    """Queues tell by their description, and go with their pool; what others made and all use stays theirs."""
    return step.kind != "queue" and (step.action == "create" or step.kind not in SHARED)


def notification_block(server: Server, name: str) -> str:
    """The id of the notification block `TYPE/NAME`. Raises UserError."""
    kind, _, block = name.partition("/")
    found = server.get(f"/block_types/slug/{kind}/block_documents/name/{block}") if kind and block else None
    if found is None:
        raise UserError(
            "--notify",
            f"the server has no block {name!r}",
            "create it in the UI under Blocks, and give it as TYPE/NAME, e.g. slack-webhook/ops",
        )
    if "notify" not in found["block_schema"]["capabilities"]:
        raise UserError("--notify", f"{name!r} is no notification block", "give one, e.g. slack-webhook/ops")
    return str(found["id"])


# Removal


def removal(server: Server, made: Made, only: list[Pool] | None) -> list[Step]:
    """The steps that remove what was made, the last made first. What others use by now is kept."""
    standing: dict[Key, Found] = {key: found for key in made if (found := server.find(*key))}
    going = standing if only is None else _of_pools(standing, only)
    ids = {found["id"] for found in going.values()}
    steps = []
    for key, found in going.items():
        users = _users(server, key, found, ids)
        detail = (
            f"used by {', '.join(users)}" if users else "with its queues" if key[0] == "work pool" else ""
        )
        steps.append(Step(*key, "keep" if users else "remove", detail, found=found))
    order = list(reversed(deploy_plan.KINDS))
    return sorted(steps, key=lambda step: (order.index(step.kind), step.name))


def _of_pools(standing: dict[Key, Found], pools: list[Pool]) -> dict[Key, Found]:
    """What belongs to these pools; and what all share, if no other pool stands."""
    names = {pool.work_pool for pool in pools}
    limits = {pool.limit for pool in pools}
    if {name for kind, name in standing if kind == "work pool"} <= names:
        return standing
    return {
        (kind, name): found
        for (kind, name), found in standing.items()
        if (kind == "work pool" and name in names)
        or (kind == "limit" and name in limits)
        or (kind == "deployment" and found["work_pool_name"] in names)
    }


def _users(server: Server, key: Key, found: Found, going: set[str]) -> list[str]:
    """What would go with an object and is not ours: queues and deployments of a pool, runs of a flow."""
    kind, name = key
    users: list[str] = []
    if kind == "work pool":
        queues = server.all(f"/work_pools/{name}/queues/filter")
        users += [f"queue {q['name']}" for q in queues if q["name"] != "default" and not is_marked(q)]
        chosen = {"work_pools": {"name": {"any_": [name]}}}
    elif kind == "flow":
        chosen = {"flows": {"id": {"any_": [found["id"]]}}}
        runs = server.request("POST", "/flow_runs/count", {**chosen, **RAN})
        users += [f"{runs} runs"] if runs else []
    else:
        return users
    others = server.all("/deployments/filter", chosen)
    return users + [f"deployment {other['name']}" for other in others if other["id"] not in going]


# What is printed


def show_steps(steps: list[Step], url: str) -> str:
    """The plan, one step a line, and the numbers below."""
    rows = [(step.action, step.kind, step.name, step.detail) for step in steps]
    counts = Counter(step.action for step in steps)
    summary = ", ".join(f"{count} {_done(action)}" for action, count in counts.items())
    return "\n".join([f"Plan for {url}", *_columns(rows, "  "), summary])


def _done(action: str) -> str:
    return action if action == "unchanged" else f"to {action}"


def show_pools(server: Server, pools: list[Pool]) -> str:
    """The table of what stands, one pool a line."""
    rows = [("pool", "type", "hardware", "jobs", "at once", "workers", "queues", "deployments")]
    for pool in pools:
        name = pool.work_pool
        stands = server.find("work pool", name) or {}
        limit = server.find("limit", pool.limit) or {}
        queues = sorted(server.all(f"/work_pools/{name}/queues/filter"), key=lambda queue: queue["priority"])
        used = server.all("/deployments/filter", {"work_pools": {"name": {"any_": [name]}}})
        rows.append(
            (
                name,
                str(stands.get("type", "")),
                pool.hardware,
                str(stands.get("concurrency_limit", "")),
                str(limit.get("limit", "-")),
                str(len(server.all(f"/work_pools/{name}/workers/filter", ONLINE))),
                ", ".join(_queue(queue) for queue in queues),
                ", ".join(sorted(found["name"] for found in used)) or "-",
            )
        )
    return "\n".join(_columns(rows))


def _queue(queue: Found) -> str:
    limit = queue["concurrency_limit"]
    return queue["name"] if limit is None else f"{queue['name']} ({limit} at once)"


def _columns(rows: Sequence[tuple[str, ...]], indent: str = "") -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    padded = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return [f"{indent}{line}".rstrip() for line in padded]
