"""The command `outrider` whose replicas are drawn by chance: what the router by prefix is compared with."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outrider.cli.main import main
from outrider.server.replicas import run


class RandomRouter(RequestRouter):
    """Draws a replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas in a random order."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


if __name__ == "__main__":
    run.PrefixRouter = RandomRouter
    main()
