"""Where data sets come from: scikit-learn's digits, a directory of IDX files, text, or a user's function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from quintsched.errors import InputError, UsageError, suggest
from quintsched.user_code import call_object, load_object, names_file

from ..objects.user_code import arguments_of
from ..settings.job import DataConfig
from ..settings.strict_settings import read_settings
from .dataset import Dataset, Normalization, Split
from .idx import read_image_label_pair
from .loaders import Loaders
from .sampler import BatchSampler
from .text import TextOptions, load_text

BUILT_IN = ("digits", "mnist", "text")

DIGITS = Normalization(mean=4.884, std=6.017)
"""Of the 0…16 grey values of scikit-learn's digits."""

MNIST = Normalization(mean=0.1307 * 255, std=0.3081 * 255)
"""Of the 0…255 grey values of MNIST."""


def load_dataset(config: DataConfig, replica: int = 0, num_replicas: int = 1) -> Dataset | Loaders:
    """Return the data set of a job, or the loaders of one replica.

    A user's function gets the options by name, `path` where one is given, and `replica` and `num_replicas` if it takes
    them; it returns a Dataset, a loader, or Loaders. "text" is the
    file at the path. Any other name with a path means the MNIST files in that directory; "digits" without one is
    scikit-learn's.
    Raises UsageError for an unknown name, for options nobody reads and for files that are missing, InputError for
    broken files.
    """
    if names_file(config.name):
        return _load_user(config, {"replica": replica, "num_replicas": num_replicas})
    path = None if config.path is None else Path(config.path)
    if config.name == "text":
        return load_text(path, read_settings(TextOptions, config.options, "job", prefix="data.options"))
    if config.options:
        raise UsageError(f"data.options: {config.name!r} has no options, but there is: {', '.join(config.options)}")
    if config.name not in BUILT_IN:
        raise UsageError(f"data.name: there is no data set {config.name!r}{suggest(config.name, BUILT_IN)}")
    if path is not None:
        return _load_idx(path)
    if config.name == "mnist":
        raise UsageError("data.path: 'mnist' needs the directory that holds its IDX files")
    return _load_digits()


def knows_replica(config: DataConfig) -> bool:
    """Whether the data are those of a user's function that is told for which replica it loads them."""
    return names_file(config.name) and bool(_taken(config) & {"replica", "num_replicas"})


def _taken(config: DataConfig) -> set[str]:
    """Return the names of what a user's function takes."""
    function = load_object(config.name)
    return set(arguments_of(function)) if callable(function) else set()


def _load_user(config: DataConfig, replicas: Mapping[str, int]) -> Dataset | Loaders:
    path = {} if config.path is None else {"path": config.path}
    asked = {name: number for name, number in replicas.items() if name in _taken(config)}
    found = call_object(config.name, **{**asked, **config.options, **path})
    if isinstance(found, Dataset | Loaders):
        return found
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping | Iterator):
        raise UsageError(
            f"data.name: {config.name} returned a {type(found).__name__}, not a quintsched Dataset, a loader, or "
            "Loaders"
        )
    return Loaders(found)


def _load_idx(folder: Path) -> Dataset:
    splits: list[Split] = []
    for split in ("train", "t10k"):
        images, labels = read_image_label_pair(folder, f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte")
        if splits and images.shape[1:] != splits[0].inputs.shape[2:]:
            raise InputError(f"{folder}: the images of train and of t10k differ in size")
        splits.append(Split(inputs=images[:, None], targets=labels.astype(np.int64), normalization=MNIST))
    train, validation = splits
    num_classes = 1 + int(max(train.targets.max(), validation.targets.max()))
    return Dataset(name=folder.name, train=train, validation=validation, num_classes=num_classes)


def _load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "data.name: 'digits' comes with scikit-learn, which is not installed; "
            "pip install 'quintsched[examples]', or set data.path to a directory with MNIST's files"
        ) from None
    images, targets = load_digits(return_X_y=True)
    images, targets = images.astype(np.float32).reshape(-1, 1, 8, 8), targets.astype(np.int64)
    order = next(BatchSampler(num_samples=len(targets), batch_size=len(targets)).batches(epoch=0))
    train, validation = (
        Split(inputs=images[rows], targets=targets[rows], normalization=DIGITS)
        for rows in np.split(order, [len(order) * 4 // 5])
    )
    return Dataset(name="digits", train=train, validation=validation, num_classes=10)
