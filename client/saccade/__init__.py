"""Client of the Saccade inference server for vision-language-action models."""

from saccade.client import Client
from saccade.credentials import Credentials
from saccade.errors import RequestFailed, SaccadeError, SessionClosed
from saccade.session import Session
from saccade.types import (
    ActionDimension,
    Actions,
    ActionSample,
    ActionSpace,
    Camera,
    FrameUsed,
    LatencyClass,
    ModalityTokens,
    ModelInfo,
    ServerStatus,
    Timings,
)

__version__ = "0.1.0"
__all__ = [
    "ActionDimension",
    "ActionSample",
    "ActionSpace",
    "Actions",
    "Camera",
    "Client",
    "Credentials",
    "FrameUsed",
    "LatencyClass",
    "ModalityTokens",
    "ModelInfo",
    "RequestFailed",
    "SaccadeError",
    "ServerStatus",
    "Session",
    "SessionClosed",
    "Timings",
]
