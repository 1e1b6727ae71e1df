"""What may be given as a frame, and how it goes on the wire."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Union

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.v1 import inference_pb2

ImageLike = Union[bytes, str, "os.PathLike[str]", npt.NDArray[np.uint8], Image.Image]
"""JPEG or PNG bytes, a path to such a file, an RGB uint8 array [height, width, 3], a PIL image."""


def frame(
    image: ImageLike,
    camera: str = "",
    capture_time_ns: int | None = None,
    age_s: float = 0.0,
) -> inference_pb2.VisionFrame:
    """A frame message. Arrays and PIL images are sent raw (no loss); files and bytes as they are.

    ``capture_time_ns`` defaults to now on the monotonic clock; raises ValueError on a wrong array.
    """
    message = inference_pb2.VisionFrame(
        camera=camera,
        capture_time_ns=time.monotonic_ns() if capture_time_ns is None else capture_time_ns,
        age_us=max(0, round(age_s * 1e6)),
    )
    if isinstance(image, bytes):
        message.encoded = image
    elif isinstance(image, (str, os.PathLike)):
        message.encoded = Path(image).read_bytes()
    else:
        array = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise ValueError(
                f"a frame array must be uint8 [height, width, 3], not {array.dtype} {array.shape}"
            )
        message.raw.pixel_format = inference_pb2.PIXEL_FORMAT_RGB8
        message.raw.height, message.raw.width = array.shape[:2]
        message.raw.data = np.ascontiguousarray(array).tobytes()
    return message


def to_jpeg(array: npt.NDArray[np.uint8], quality: int = 95) -> bytes:
    """JPEG bytes of an RGB array; 4:4:4, so that thin coloured lines keep their colour."""
    out = io.BytesIO()
    Image.fromarray(array).save(out, "JPEG", quality=quality, subsampling=0)
    return out.getvalue()
