"""Receivers of a run's figures: MLflow and trackio. TensorBoard and Weights & Biases need no file, only their names.

    log:
      sinks:
        - {name: tensorboard, options: {log_dir: out/board}}
        - {name: wandb, options: {project: mine, mode: offline}}
        - {name: "examples/sinks.py:MLflow", options: {uri: "sqlite:///out/mlflow.db"}}
        - {name: "examples/sinks.py:Trackio", options: {project: mine}}

Rank 0 builds each, calls it with the figures of a step, and closes it at the end, also of a run that fails.
"""

from collections.abc import Mapping


class MLflow:
    """A run of MLflow, on a server or in a database of this machine."""

    def __init__(self, uri: str, experiment: str = "quintsched") -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        found = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if found is None else found.experiment_id
        self.run = self.client.create_run(number).info.run_id

    def __call__(self, figures: Mapping[str, float], *, step: int) -> None:
        for name, value in figures.items():
            self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """A run of trackio, in its database on this machine (TRACKIO_DIR), or in a space of Hugging Face."""

    def __init__(self, project: str, **options: str) -> None:
        import trackio

        self.run = trackio.init(project=project, **options)

    def __call__(self, figures: Mapping[str, float], *, step: int) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()
