"""The final policy as a model in the MLflow registry, so that `mlflow.transformers.load_model` gives it back."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import mlflow
import mlflow.transformers

from tasks.services import store_parser
from tasks.store import Store, layout


def register(store: Store, version: int, tracking_uri: str, run_id: str, name: str) -> str:
    """Log `weights/<version>` to an MLflow run and register it as `name`; returns the model's URI.

    The folder is logged as it is: the model is not loaded into memory.
    """
    mlflow.set_tracking_uri(tracking_uri)
    with tempfile.TemporaryDirectory(prefix="rollart-register-") as folder:
        path = Path(folder) / "model"
        store.fetch(layout.weights(version), path)
        with mlflow.start_run(run_id=run_id, log_system_metrics=False):
            logged = mlflow.transformers.log_model(
                transformers_model=str(path),
                name="model",
                task="text-generation",
                registered_model_name=name,
                metadata={"store": store.uri, "version": version},
                pip_requirements=["torch", "transformers"],
            )
    return logged.model_uri


def main(argv: list[str] | None = None) -> int:
    """Register the weights of one version of the run at --store."""
    parser = store_parser("tasks.training.register", main.__doc__)
    parser.add_argument("--version", required=True, type=int, help="the policy version to register")
    parser.add_argument("--tracking-uri", required=True, help="MLflow tracking URI")
    parser.add_argument("--run-id", required=True, help="the MLflow run the model belongs to")
    parser.add_argument("--name", required=True, help="name in the registry")
    arguments = parser.parse_args(argv)
    store = Store(arguments.store, arguments.endpoint_url)
    print(register(store, arguments.version, arguments.tracking_uri, arguments.run_id, arguments.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
