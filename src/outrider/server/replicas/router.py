"""Adapts our router to Ray Serve's interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.server.replicas.messages import Parcel
from outrider.server.replicas.prefixes import PrefixIndex


class PrefixRouter(RequestRouter):
    """Sends a request where the longest beginning of its prompt was read, and otherwise to the least loaded replica."""

    def initialize_state(self, slack: int, **_: Any) -> None:
        """Called by Ray Serve before the first request; see PrefixIndex for `slack`."""
        self._index: PrefixIndex[ReplicaID] = PrefixIndex(slack)
        self._loads: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are to be tried, each a rank of its own."""
        pieces = _pieces(pending_request)
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._index.choose(pieces, {replica: self._loads[replica] for replica in replicas})
        # Noted now, and not when it was sent: the next request with this beginning may come before that.
        self._index.add(ranked[0], pieces)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait a while before all are tried again
        return [[replicas[replica]] for replica in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request has gone to a replica."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A replica has answered, or has failed to."""
        super().on_request_completed(replica_id, internal_request_id)
        self._loads[replica_id] = max(0, self._loads[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        alive = [replica.replica_id for replica in replicas]
        self._index.keep(alive)
        self._loads = Counter({replica: self._loads[replica] for replica in alive})


def _pieces(pending_request: PendingRequest | None) -> Sequence[bytes]:
    args = () if pending_request is None else pending_request.args
    return args[0].beginnings if args and isinstance(args[0], Parcel) else ()
