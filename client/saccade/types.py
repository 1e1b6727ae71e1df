"""Plain values that the client gives back. Times are in seconds unless a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.v1 import inference_pb2, models_pb2, server_pb2

Answer = inference_pb2.ActionChunk | inference_pb2.GenerateResult


@dataclass(frozen=True)
class Camera:
    """A camera of a model."""

    name: str
    width: int
    """Pixels the model sees; frames of other sizes are resized by the server."""
    height: int
    required: bool


@dataclass(frozen=True)
class ActionDimension:
    """One value of an action."""

    name: str
    unit: str


@dataclass(frozen=True)
class ActionSpace:
    """Shape and meaning of a chunk of actions."""

    steps: int
    """Actions of one chunk."""
    dim: int
    """Values of one action."""
    dimensions: tuple[ActionDimension, ...]
    """Names and units; empty: not stated."""
    reference: str
    """``absolute``, ``relative`` or ``unspecified``."""
    dt_s: float
    """Seconds between the steps; 0: not stated."""


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model and what it expects."""

    name: str
    family: str
    cameras: tuple[Camera, ...]
    statistics: dict[str, ActionSpace]
    state_dim: int
    default_class: str
    vision_tokens: int
    max_positions: int
    compute_type: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    fingerprint: str
    flow_steps: int = 0
    """Denoise steps of an answer of which the request says nothing; 0: it does not denoise."""
    flow_width: int = 0
    """Values of the noise of one action."""
    flow_actions: int = 0
    """Actions that it denoises; the first of them are answered."""


@dataclass(frozen=True)
class Flow:
    """How a model that denoises answers."""

    steps: int = 0
    """Denoise steps; 0: the model's own number."""
    least_steps: int = 0
    """Steps that are better than no answer in time, in a class that degrades; 0: as the server is
    configured."""
    noise: npt.ArrayLike | None = None
    """Of shape (samples, ModelInfo.flow_actions, ModelInfo.flow_width); none: from the seed."""
    committed: npt.ArrayLike | None = None
    """``normalized`` of the actions that the robot executes until the answer is there; the answer
    begins with them (real-time chunking)."""
    per_action_time: bool = False
    """The model was trained with a flow time for each action; else they are inpainted."""


@dataclass(frozen=True)
class LatencyClass:
    """A latency class of the server."""

    name: str
    deadline_s: float
    """From a request's arrival; 0: none."""
    tier: int
    runs_late: bool
    degrades: bool = False
    """A request that would be late gets fewer denoise steps, as far as it may."""


@dataclass(frozen=True)
class ServerStatus:
    """The server as a whole."""

    version: str
    uptime_s: float
    ready: bool
    draining: bool
    sessions: int
    models: tuple[str, ...]
    classes: tuple[LatencyClass, ...]
    max_message_bytes: int


@dataclass(frozen=True)
class ActionSample:
    """One sampled chunk; arrays are [steps, dim]."""

    values: npt.NDArray[np.float64]
    """Commands in the robot's units."""
    normalized: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Token:
    """One token of an answer in progress; a preview, some may be missing."""

    sample: int
    """Which of the request's samples, from 0."""
    index: int
    """Which token of the sample, from 0."""
    token: int


@dataclass(frozen=True)
class Reconnect:
    """How a session reconnects: after 1, 2, 4, ... times ``initial_s``, at most ``cap_s``.

    Every delay is a random half to whole of that, so that many robots do not come back at once.
    """

    initial_s: float = 0.1
    cap_s: float = 2.0
    give_up_s: float | None = None
    """Seconds without a connection after which the session is over; None: never."""

    def __post_init__(self) -> None:
        if not 0 < self.initial_s <= self.cap_s:
            raise ValueError("a reconnect needs 0 < initial_s <= cap_s")


DEFAULT_RECONNECT = Reconnect()


@dataclass(frozen=True)
class Reconnected:
    """A session that was opened again."""

    cause: str
    """What ended the connection before."""
    attempts: int
    down_s: float
    """Seconds from the loss until the session was open again."""
    session_id: int
    same_model: bool
    """The model answers as before (equal fingerprints)."""


@dataclass(frozen=True)
class TokenRun:
    """Prompt tokens in a row whose K/V came from the same source."""

    source: str
    """``computed``, ``reused``, or ``evicted``: computed again, since the cache had given it up."""
    count: int


@dataclass(frozen=True)
class FrameUsed:
    """A frame that an answer was computed from."""

    camera: str
    capture_time_ns: int
    """As the client gave it."""
    age_s: float
    """When the answer was finished."""
    runs: tuple[TokenRun, ...] = ()
    """Its tokens, as patches of the picture row by row from the top."""


@dataclass(frozen=True)
class Timings:
    """Where the server's time went."""

    queue_s: float
    encode_s: float
    prefill_s: float
    act_s: float
    total_s: float
    decode_s: float
    """Image decoding and resizing, before the request; not part of the total."""


@dataclass(frozen=True)
class ModalityTokens:
    """Prompt tokens of one modality."""

    total: int
    cached: int


@dataclass(frozen=True)
class Actions:
    """The answer to one act request."""

    samples: tuple[ActionSample, ...]
    space: ActionSpace
    frames: tuple[FrameUsed, ...]
    timings: Timings
    tokens: dict[str, ModalityTokens]
    """By modality: ``vision``, ``text``, ``state``, ``action``."""
    frames_cached: bool
    deadline_s: float
    """The deadline it was judged by; 0: none."""
    deadline_met: bool
    late: bool
    latency_class: str
    statistics_key: str
    degradation: tuple[str, ...] = ()
    """What was given up to be in time: ``fewer_flow_steps``, or nothing."""
    flow_steps: int = 0
    """Denoise steps that it was made with; 0: the model does not denoise."""
    observation_version: int = 0
    """Counts the observations of the session whose frames, text or cameras differ."""
    state: tuple[float, ...] = ()
    """What it was computed from, and what relative actions are relative to."""
    state_capture_time_ns: int = 0
    round_trip_s: float = field(default=0.0, compare=False)
    """Measured by the client, request sent to answer received; NaN of a pushed answer, which nobody asked for."""

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """Commands of the first sample, [steps, dim], in the robot's units."""
        return self.samples[0].values


@dataclass(frozen=True)
class TextOptions:
    """How a text is written; the defaults are greedy."""

    max_new_tokens: int = 0
    """Of each sequence; 0: the server's default."""
    temperature: float = 0.0
    top_p: float = 0.0
    """Sample from the most likely tokens with this probability together; 0: from all."""
    seed: int = 0
    num_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own."""
    ignore_eos: bool = False


DEFAULT_TEXT_OPTIONS = TextOptions()


@dataclass(frozen=True)
class TextToken:
    """One token of a text in progress."""

    sequence: int
    index: int
    token_id: int
    text: str
    """What it completes: whole characters, often empty."""


@dataclass(frozen=True)
class TextSequence:
    """One sequence of a text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """``stop`` or ``length``."""
    log_probability: float
    """Of beam search, else 0; so is the score, which orders the sequences."""
    score: float


@dataclass(frozen=True)
class Text:
    """The whole answer to one ``generate``."""

    sequences: tuple[TextSequence, ...]
    frames: tuple[FrameUsed, ...]
    timings: Timings
    tokens: dict[str, ModalityTokens]
    frames_cached: bool
    deadline_s: float
    """The deadline it was judged by; 0: none."""
    deadline_met: bool
    late: bool
    latency_class: str

    @property
    def text(self) -> str:
        """Of the first sequence."""
        return self.sequences[0].text


def enum_name(enum: Any, number: int, prefix: str) -> str:
    """An enum value without its prefix, small; the number, for a value of a newer server."""
    known = enum.DESCRIPTOR.values_by_number.get(number)
    return str(known.name).removeprefix(prefix).lower() if known else str(number)


def action_space(message: models_pb2.ActionSpace) -> ActionSpace:
    """From the wire."""
    return ActionSpace(
        steps=message.steps,
        dim=message.dim,
        dimensions=tuple(ActionDimension(d.name, d.unit) for d in message.dimensions),
        reference=enum_name(models_pb2.ActionReference, message.reference, "ACTION_REFERENCE_"),
        dt_s=message.dt_s,
    )


def model_info(message: models_pb2.Model) -> ModelInfo:
    """From the wire."""
    return ModelInfo(
        name=message.name,
        family=message.family,
        cameras=tuple(Camera(c.name, c.width, c.height, c.required) for c in message.cameras),
        statistics={s.key: action_space(s.action_space) for s in message.statistics},
        state_dim=message.state_dim,
        default_class=message.default_class,
        vision_tokens=message.vision_tokens,
        max_positions=message.max_positions,
        compute_type=message.compute_type,
        parameters=message.parameters,
        weight_bytes=message.weight_bytes,
        kv_bytes_per_token=message.kv_bytes_per_token,
        fingerprint=message.fingerprint,
        flow_steps=message.flow_steps,
        flow_width=message.flow_width,
        flow_actions=message.flow_actions,
    )


def server_status(message: server_pb2.GetStatusResponse) -> ServerStatus:
    """From the wire."""
    return ServerStatus(
        version=message.version,
        uptime_s=message.uptime_us * 1e-6,
        ready=message.ready,
        draining=message.draining,
        sessions=message.sessions,
        models=tuple(message.models),
        classes=tuple(
            LatencyClass(c.name, c.deadline_us * 1e-6, c.tier, c.runs_late, c.degrades) for c in message.classes
        ),
        max_message_bytes=message.limits.max_message_bytes,
    )


def timings(t: inference_pb2.Timings) -> Timings:
    """From the wire."""
    return Timings(
        queue_s=t.queue_us * 1e-6,
        encode_s=t.encode_us * 1e-6,
        prefill_s=t.prefill_us * 1e-6,
        act_s=t.act_us * 1e-6,
        total_s=t.total_us * 1e-6,
        decode_s=t.decode_us * 1e-6,
    )


def frames_used(message: Answer) -> tuple[FrameUsed, ...]:
    """From the wire."""
    return tuple(
        FrameUsed(
            f.camera,
            f.capture_time_ns,
            f.age_us * 1e-6,
            tuple(
                TokenRun(
                    enum_name(inference_pb2.TokenSource, run.source, "TOKEN_SOURCE_"), run.count
                )
                for run in f.runs
            ),
        )
        for f in message.frames
    )


def modality_tokens(message: Answer) -> dict[str, ModalityTokens]:
    """From the wire."""
    return {
        enum_name(inference_pb2.Modality, m.modality, "MODALITY_"): ModalityTokens(
            m.total, m.cached
        )
        for m in message.tokens
    }


def text_token(message: inference_pb2.GeneratedToken) -> TextToken:
    """From the wire."""
    return TextToken(message.sequence, message.index, message.token_id, message.text)


def text(message: inference_pb2.GenerateResult) -> Text:
    """From the wire."""
    return Text(
        sequences=tuple(
            TextSequence(
                text=s.text,
                token_ids=tuple(s.token_ids),
                finish_reason=enum_name(
                    inference_pb2.FinishReason, s.finish_reason, "FINISH_REASON_"
                ),
                log_probability=s.log_probability,
                score=s.score,
            )
            for s in message.sequences
        ),
        frames=frames_used(message),
        timings=timings(message.timings),
        tokens=modality_tokens(message),
        frames_cached=message.frames_cached,
        deadline_s=message.deadline_us * 1e-6,
        deadline_met=message.deadline_met,
        late=message.late,
        latency_class=message.latency_class,
    )


def _token_ids(sample: inference_pb2.ActionSample, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """In the shape of the values where each value is one token, else as they are."""
    ids = np.array(sample.token_ids, np.int32)
    return ids.reshape(shape) if ids.size == shape[0] * shape[1] else ids


def actions(message: inference_pb2.ActionChunk, round_trip_s: float) -> Actions:
    """From the wire."""
    space = action_space(message.action_space)
    shape = (space.steps, space.dim)
    return Actions(
        samples=tuple(
            ActionSample(
                values=np.array(s.values, np.float64).reshape(shape),
                normalized=np.array(s.normalized, np.float32).reshape(shape),
                token_ids=_token_ids(s, shape),
            )
            for s in message.samples
        ),
        space=space,
        frames=frames_used(message),
        timings=timings(message.timings),
        tokens=modality_tokens(message),
        frames_cached=message.frames_cached,
        deadline_s=message.deadline_us * 1e-6,
        deadline_met=message.deadline_met,
        late=message.late,
        latency_class=message.latency_class,
        statistics_key=message.statistics_key,
        degradation=tuple(
            enum_name(inference_pb2.Degradation, d, "DEGRADATION_") for d in message.degradation
        ),
        flow_steps=message.flow_steps,
        observation_version=message.observation_version,
        state=tuple(message.state),
        state_capture_time_ns=message.state_capture_time_ns,
        round_trip_s=round_trip_s,
    )
