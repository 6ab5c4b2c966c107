"""Schedulers on an in-process bus, checked for leaks when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scheduler_bus import Cluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Factory of clusters; arguments as of `Cluster`. Each is checked and closed at the end."""
    clusters: list[Cluster] = []

    def make(**arguments: Any) -> Cluster:
        directory = tmp_path / str(len(clusters))
        directory.mkdir()
        clusters.append(Cluster(directory, **arguments))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.check()
        cluster.close()
