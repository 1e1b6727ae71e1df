"""How a connection is made; the one place that knows its options."""

from __future__ import annotations

import grpc
import grpc.aio

from saccade.credentials import Credentials

OPTIONS = [
    ("grpc.max_send_message_length", -1),  # the server states and enforces its limit
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A session that reconnects paces itself; gRPC's own pauses (up to two minutes) would add to that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # in truth the time one attempt may take
]


def connect(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel for the blocking client."""
    return credentials.channel(address, OPTIONS)


def connect_aio(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel for the asyncio client; made in the event loop that uses it."""
    return credentials.aio_channel(address, OPTIONS)
