"""What a server did just now, what its caches hold, and its end: the Admin service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from saccade import errors
from saccade.v1 import admin_pb2, admin_pb2_grpc, error_pb2

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class RecentRequest:
    """What became of one request. Times in seconds."""

    request_id: int
    session_id: int
    model: str
    latency_class: str
    arrival_s: float
    """Since the server started."""
    deadline_s: float
    """From arrival; 0: none."""
    total_s: float
    """From arrival to its end."""
    outcome: str
    """``ok``, ``late``, or the reason of its error in lower case."""
    queue_s: float
    encode_s: float
    prefill_s: float
    act_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Partition:
    """One modality's part of a cache; blocks and, since the start, tokens."""

    modality: str
    held: int
    idle: int
    floor: int
    cap: int
    hit_tokens: int
    miss_tokens: int


@dataclass(frozen=True)
class Cache:
    """The K/V cache of one model on one worker."""

    model: str
    worker: int
    total_blocks: int
    free_blocks: int
    partitions: tuple[Partition, ...]
    embeddings_held: int
    embeddings_idle: int


def _recent(message: admin_pb2.RecentRequest) -> RecentRequest:
    name = error_pb2.ErrorReason.Name(message.reason).removeprefix("ERROR_REASON_").lower()
    timings = message.timings
    return RecentRequest(
        request_id=message.request_id,
        session_id=message.session_id,
        model=message.model,
        latency_class=message.latency_class,
        arrival_s=message.arrival_us * 1e-6,
        deadline_s=message.deadline_us * 1e-6,
        total_s=message.total_us * 1e-6,
        outcome=name if message.code else "late" if message.late else "ok",
        queue_s=timings.queue_us * 1e-6,
        encode_s=timings.encode_us * 1e-6,
        prefill_s=timings.prefill_us * 1e-6,
        act_s=timings.act_us * 1e-6,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
    )


def _cache(message: admin_pb2.CacheState) -> Cache:
    return Cache(
        model=message.model,
        worker=message.worker,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        partitions=tuple(
            Partition(p.modality, p.held, p.idle, p.floor, p.cap, p.hit_tokens, p.miss_tokens)
            for p in message.partitions
        ),
        embeddings_held=message.embeddings_held,
        embeddings_idle=message.embeddings_idle,
    )


class Admin:
    """The Admin service of a client's server (``Client.admin``)."""

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stub = admin_pb2_grpc.AdminStub(channel)

    def recent(self, max_requests: int = 0) -> list[RecentRequest]:
        """The last requests, oldest first; 0: all that the server keeps."""
        request = admin_pb2.GetRecentRequest(max_requests=max_requests)
        return [_recent(r) for r in self._call(self._stub.GetRecent, request).requests]

    def trace(self) -> bytes:
        """The last steps and requests as a Chrome trace in JSON."""
        answer = self._call(self._stub.GetTrace, admin_pb2.GetTraceRequest())
        return bytes(answer.json)

    def caches(self) -> list[Cache]:
        """What the caches hold."""
        answer = self._call(self._stub.GetCache, admin_pb2.GetCacheRequest())
        return [_cache(c) for c in answer.caches]

    def broken_invariant(self) -> str:
        """The first invariant of the caches that does not hold, or nothing. Holds up the scheduler."""
        request = admin_pb2.GetCacheRequest(check_invariants=True)
        return str(self._call(self._stub.GetCache, request).broken_invariant)

    def drain(self) -> None:
        """Ends the server as SIGTERM does; returns at once."""
        self._call(self._stub.Drain, admin_pb2.DrainRequest())

    def _call(self, method: Callable[..., _Answer], request: Any) -> _Answer:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
