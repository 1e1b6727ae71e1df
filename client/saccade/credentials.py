"""How a client proves who it is, and whom it trusts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

_LOOPBACK = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d+|unix:.*")


@dataclass(frozen=True)
class Credentials:
    """TLS and a bearer token. Files are PEM; all empty is a plain connection without a token."""

    tls_ca: str = ""
    """File of what signed the server's certificate; given, the connection is encrypted."""
    tls_cert: str = ""
    """File of the client's certificate, for a server that asks for one; needs ``tls_key``."""
    tls_key: str = ""
    """File of its private key."""
    token_file: str = ""
    """File of the bearer token; white space around it is not part of it."""

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """A channel to the server. Raises OSError for a file, ValueError for what does not fit."""
        tls, token = self._load(address)
        if tls is not None:
            channel = grpc.secure_channel(address, tls, options=options)
        else:
            channel = grpc.insecure_channel(address, options=options)
        return grpc.intercept_channel(channel, _AddToken(token)) if token else channel

    def aio_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """The same for asyncio, but for the token: see ``metadata``."""
        tls, _ = self._load(address)
        if tls is not None:
            return grpc.aio.secure_channel(address, tls, options=options)
        return grpc.aio.insecure_channel(address, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call of an asyncio channel carries."""
        token = self._token()
        return (_header(token),) if token else ()

    def _load(self, address: str) -> tuple[grpc.ChannelCredentials | None, str]:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("a client certificate and its key must be given together")
        if self.tls_cert and not self.tls_ca:
            raise ValueError("a client certificate needs TLS: give tls_ca, too")
        token = self._token()
        if token and not self.tls_ca and not _LOOPBACK.fullmatch(address):
            raise ValueError(f"the token would travel in the clear to {address}: give tls_ca")
        if not self.tls_ca:
            return None, token
        identity = (Path(self.tls_key), Path(self.tls_cert)) if self.tls_cert else ()
        tls = grpc.ssl_channel_credentials(
            Path(self.tls_ca).read_bytes(), *(path.read_bytes() for path in identity)
        )
        return tls, token

    def _token(self) -> str:
        if not self.token_file:
            return ""
        token = Path(self.token_file).read_text(encoding="ascii").strip()
        if not token or not token.isprintable() or " " in token:
            raise ValueError(f"{self.token_file} must hold one token and nothing else")
        return token


def _header(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _CallDetails(_Details, grpc.ClientCallDetails):
    pass


class _AddToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the token with every call. Call credentials would do, but only over TLS."""

    def __init__(self, token: str) -> None:
        self._header = _header(token)

    def _call(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._header]
        return continuation(
            _CallDetails(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Adds the header."""
        return self._call(continuation, details, request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """Adds the header."""
        return self._call(continuation, details, request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Adds the header."""
        return self._call(continuation, details, requests)
