#pragma once
// A model's prompt as the segments of a timeline.
#include <cstdint>
#include <utility>

#include "base/content.h"
#include "base/status.h"
#include "kv/timeline.h"
#include "model/model.h"

namespace saccade {

// frame_of(camera) gives the frame of a vision segment: a ContentRef, or a StatusOr of one.
// INTERNAL when the prompt holds anything but text and vision; after an error `builder` is of no
// use.
template <class FrameOf>
absl::Status AddPrompt(const Prompt& prompt, uint32_t vision_tokens, FrameOf&& frame_of,
                       TimelineBuilder& builder) {
  for (const PromptSegment& segment : prompt.segments) {
    switch (segment.modality) {
      case Modality::kText:
        builder.AddText(segment.tokens);
        break;
      case Modality::kVision: {
        absl::StatusOr<ContentRef> frame = frame_of(segment.camera);
        RETURN_IF_ERROR(frame.status());
        builder.AddVision(segment.camera, *std::move(frame), vision_tokens);
        break;
      }
      case Modality::kState:
      case Modality::kAction:
        return absl::InternalError("a prompt may hold text and vision only");
    }
  }
  return absl::OkStatus();
}

}  // namespace saccade
