from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

ACTION_REFERENCE_ABSOLUTE: ActionReference
ACTION_REFERENCE_RELATIVE: ActionReference
ACTION_REFERENCE_UNSPECIFIED: ActionReference
DESCRIPTOR: _descriptor.FileDescriptor

class ActionDimension(_message.Message):
    __slots__ = ["name", "unit"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    unit: str
    def __init__(self, name: _Optional[str] = ..., unit: _Optional[str] = ...) -> None: ...

class ActionSpace(_message.Message):
    __slots__ = ["dim", "dimensions", "dt_s", "reference", "steps"]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DT_S_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    dim: int
    dimensions: _containers.RepeatedCompositeFieldContainer[ActionDimension]
    dt_s: float
    reference: ActionReference
    steps: int
    def __init__(self, steps: _Optional[int] = ..., dim: _Optional[int] = ..., dimensions: _Optional[_Iterable[_Union[ActionDimension, _Mapping]]] = ..., reference: _Optional[_Union[ActionReference, str]] = ..., dt_s: _Optional[float] = ...) -> None: ...

class Camera(_message.Message):
    __slots__ = ["height", "name", "required", "width"]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    height: int
    name: str
    required: bool
    width: int
    def __init__(self, name: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., required: bool = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ["models"]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ["cameras", "compute_type", "default_class", "family", "fingerprint", "flow_actions", "flow_steps", "flow_width", "kv_bytes_per_token", "max_positions", "name", "parameters", "state_dim", "statistics", "vision_tokens", "weight_bytes"]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CLASS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FLOW_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    FLOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    FLOW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIM_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    VISION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedCompositeFieldContainer[Camera]
    compute_type: str
    default_class: str
    family: str
    fingerprint: str
    flow_actions: int
    flow_steps: int
    flow_width: int
    kv_bytes_per_token: int
    max_positions: int
    name: str
    parameters: int
    state_dim: int
    statistics: _containers.RepeatedCompositeFieldContainer[StatisticsSet]
    vision_tokens: int
    weight_bytes: int
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., cameras: _Optional[_Iterable[_Union[Camera, _Mapping]]] = ..., statistics: _Optional[_Iterable[_Union[StatisticsSet, _Mapping]]] = ..., state_dim: _Optional[int] = ..., default_class: _Optional[str] = ..., vision_tokens: _Optional[int] = ..., max_positions: _Optional[int] = ..., compute_type: _Optional[str] = ..., parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., fingerprint: _Optional[str] = ..., flow_steps: _Optional[int] = ..., flow_width: _Optional[int] = ..., flow_actions: _Optional[int] = ...) -> None: ...

class StatisticsSet(_message.Message):
    __slots__ = ["action_space", "key"]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    action_space: ActionSpace
    key: str
    def __init__(self, key: _Optional[str] = ..., action_space: _Optional[_Union[ActionSpace, _Mapping]] = ...) -> None: ...

class ActionReference(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
