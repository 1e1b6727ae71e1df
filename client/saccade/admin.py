"""What a server did just now, what it holds, its models, its limits and its end: the Admin service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from saccade import errors, types
from saccade.v1 import admin_pb2, admin_pb2_grpc, error_pb2

_Answer = TypeVar("_Answer")

LOAD_TIMEOUT_S = 600.0
"""Large checkpoints take minutes to load."""


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


@dataclass(frozen=True)
class Memory:
    """The memory budget of the server's process, in bytes."""

    limit: int
    held: int
    kinds: Mapping[str, int]
    """What is held, by what for: ``weights``, ``kv_cache``, ``frames``, ..."""


@dataclass(frozen=True)
class Limits:
    """Limits that can be changed while the server runs, under their names in the configuration."""

    values: Mapping[str, float]
    """``max_sessions``, ``acts_per_s``, ..."""
    max_queued: Mapping[str, int]
    """By latency class."""


def _limits(message: admin_pb2.LiveLimits) -> Limits:
    fields = message.DESCRIPTOR.fields
    return Limits(
        {f.name: getattr(message, f.name) for f in fields if f.name != "classes"},
        {c.name: c.max_queued for c in message.classes},
    )


def _limit_changes(
    values: Mapping[str, float], max_queued: Mapping[str, int] | None
) -> admin_pb2.SetLimitsRequest:
    request = admin_pb2.SetLimitsRequest()
    for name, value in values.items():
        field = admin_pb2.LiveLimits.DESCRIPTOR.fields_by_name.get(name)
        if field is None or name == "classes":
            raise ValueError(f"no such limit: {name}")
        whole = field.cpp_type != field.CPPTYPE_DOUBLE
        if whole and value != int(value):
            raise ValueError(f"{name} is a whole number")
        setattr(request.limits, name, int(value) if whole else float(value))
    for klass, most in (max_queued or {}).items():
        request.limits.classes.add(name=klass, max_queued=most)
    return request


def _memory(message: admin_pb2.GetMemoryResponse) -> Memory:
    return Memory(
        message.limit_bytes, message.held_bytes, {k.kind: k.held_bytes for k in message.kinds}
    )


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


def _patience(grace_s: float | None) -> float:
    return LOAD_TIMEOUT_S + (grace_s or 0.0)


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

    def load(self, name: str, folder: str = "", like: str = "") -> types.ModelInfo:
        """Loads a model: a configured one by its name, or one of the folders of ``admin.models_root``
        with the settings of ``like``."""
        request = admin_pb2.LoadModelRequest(name=name, folder=folder, like=like)
        return types.model_info(self._call(self._stub.LoadModel, request, LOAD_TIMEOUT_S).model)

    def unload(self, name: str, grace_s: float | None = None) -> None:
        """Takes a model out; accepted requests have ``grace_s``. Returns when its memory is free."""
        request = admin_pb2.UnloadModelRequest(name=name, grace_s=grace_s)
        self._call(self._stub.UnloadModel, request, _patience(grace_s))

    def reload(self, name: str, folder: str = "", grace_s: float | None = None) -> types.ModelInfo:
        """Loads a model anew beside the old one, which its sessions keep for ``grace_s``."""
        request = admin_pb2.ReloadModelRequest(name=name, folder=folder, grace_s=grace_s)
        answer = self._call(self._stub.ReloadModel, request, _patience(grace_s))
        return types.model_info(answer.model)

    def limits(self) -> Limits:
        """The limits as they are now."""
        return _limits(self._call(self._stub.GetLimits, admin_pb2.GetLimitsRequest()).limits)

    def set_limits(self, max_queued: Mapping[str, int] | None = None, **values: float) -> Limits:
        """Changes limits, all or none: ``set_limits(acts_per_s=50, max_queued={"control": 8})``."""
        request = _limit_changes(values, max_queued)
        return _limits(self._call(self._stub.SetLimits, request).limits)

    def memory(self) -> Memory:
        """The memory budget and what holds it."""
        return _memory(self._call(self._stub.GetMemory, admin_pb2.GetMemoryRequest()))

    def drain(self) -> None:
        """Ends the server as SIGTERM does; returns at once."""
        self._call(self._stub.Drain, admin_pb2.DrainRequest())

    def _call(
        self, method: Callable[..., _Answer], request: Any, timeout_s: float | None = None
    ) -> _Answer:
        try:
            return method(request, timeout=timeout_s or self._timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None


class AsyncAdmin:
    """The Admin service of an asyncio client's server (``aio.Client.admin``), as ``Admin``."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]] | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._stub = admin_pb2_grpc.AdminStub(channel)

    async def recent(self, max_requests: int = 0) -> list[RecentRequest]:
        """As ``Admin.recent``."""
        request = admin_pb2.GetRecentRequest(max_requests=max_requests)
        return [_recent(r) for r in (await self._call(self._stub.GetRecent, request)).requests]

    async def trace(self) -> bytes:
        """As ``Admin.trace``."""
        answer = await self._call(self._stub.GetTrace, admin_pb2.GetTraceRequest())
        return bytes(answer.json)

    async def caches(self) -> list[Cache]:
        """As ``Admin.caches``."""
        answer = await self._call(self._stub.GetCache, admin_pb2.GetCacheRequest())
        return [_cache(c) for c in answer.caches]

    async def broken_invariant(self) -> str:
        """As ``Admin.broken_invariant``."""
        request = admin_pb2.GetCacheRequest(check_invariants=True)
        return str((await self._call(self._stub.GetCache, request)).broken_invariant)

    async def load(self, name: str, folder: str = "", like: str = "") -> types.ModelInfo:
        """As ``Admin.load``."""
        request = admin_pb2.LoadModelRequest(name=name, folder=folder, like=like)
        answer = await self._call(self._stub.LoadModel, request, LOAD_TIMEOUT_S)
        return types.model_info(answer.model)

    async def unload(self, name: str, grace_s: float | None = None) -> None:
        """As ``Admin.unload``."""
        request = admin_pb2.UnloadModelRequest(name=name, grace_s=grace_s)
        await self._call(self._stub.UnloadModel, request, _patience(grace_s))

    async def reload(
        self, name: str, folder: str = "", grace_s: float | None = None
    ) -> types.ModelInfo:
        """As ``Admin.reload``."""
        request = admin_pb2.ReloadModelRequest(name=name, folder=folder, grace_s=grace_s)
        answer = await self._call(self._stub.ReloadModel, request, _patience(grace_s))
        return types.model_info(answer.model)

    async def limits(self) -> Limits:
        """As ``Admin.limits``."""
        answer = await self._call(self._stub.GetLimits, admin_pb2.GetLimitsRequest())
        return _limits(answer.limits)

    async def set_limits(
        self, max_queued: Mapping[str, int] | None = None, **values: float
    ) -> Limits:
        """As ``Admin.set_limits``."""
        request = _limit_changes(values, max_queued)
        return _limits((await self._call(self._stub.SetLimits, request)).limits)

    async def memory(self) -> Memory:
        """As ``Admin.memory``."""
        return _memory(await self._call(self._stub.GetMemory, admin_pb2.GetMemoryRequest()))

    async def drain(self) -> None:
        """As ``Admin.drain``."""
        await self._call(self._stub.Drain, admin_pb2.DrainRequest())

    async def _call(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> Any:
        try:
            return await method(
                request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
