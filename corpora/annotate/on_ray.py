"""Recordings on the workers of a Ray cluster. Each has its own models, and a GPU where the cluster has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from audiorl.distributed.ray_cluster import QUIET, check_answers, import_ray
from corpora.annotate.options import Annotate
from corpora.annotate.recordings import Source


def on_ray(options: Annotate, sources: Sequence[Source]) -> Iterator[tuple[Source, str]]:
    """(recording, what is wrong with it) as they end. Recordings and OUT must be on disks that all nodes share."""
    ray = import_ray()
    from ray.util import ActorPool

    if options.address is None:
        ray.init(address="local", num_cpus=options.workers, include_dashboard=False, **QUIET)
    else:
        check_answers(options.address)
        ray.init(address=options.address, **QUIET)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        absolute = replace(options, out=options.out.absolute())
        actor = ray.remote(_Worker).options(num_cpus=1, num_gpus=gpus)
        pool = ActorPool([actor.remote(absolute) for _ in range(min(options.workers, max(len(sources), 1)))])
        yield from pool.map_unordered(lambda worker, source: worker.work.remote(source), sources)
    finally:
        ray.shutdown()


class _Worker:
    def __init__(self, options: Annotate) -> None:
        from corpora.annotate.run import start_worker

        start_worker(options)

    def work(self, source: Source) -> tuple[Source, str]:
        from corpora.annotate.run import work

        return source, work(source)
