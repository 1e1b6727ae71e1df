#pragma once
// A model's prompt as the segments of a timeline.
#include <cstdint>
#include <utility>

#include "base/content.h"
#include "base/status.h"
#include "kv/timeline.h"
#include "model/model.h"

namespace saccade {

// frame_of(camera) gives the frame of a vision segment: a ContentRef, or a StatusOr of one. `state`
// is what state rows are made of, normalised; it may be null where the prompt has none. Of a prefix
// only the part is added that does not change with the state. After an error `builder` is of no
// use.
enum class PromptPart : uint8_t { kAll, kPrefix };
template <class FrameOf>
absl::Status AddPrompt(const Prompt& prompt, const ModelSpec& spec, FrameOf&& frame_of,
                       const StateRef& state, TimelineBuilder& builder,
                       PromptPart part = PromptPart::kAll) {
  if (part == PromptPart::kAll && spec.head.kind == HeadKind::kFlow) {
    builder.SetReuse(PrefixReuse::kAll);
  }
  if (spec.head.kind == HeadKind::kOnePass) builder.SetReuse(PrefixReuse::kNone);
  uint32_t number = 0;
  for (const PromptSegment& segment : prompt.segments) {
    if (part == PromptPart::kPrefix && segment.modality == Modality::kState) break;
    switch (segment.modality) {
      case Modality::kText:
        builder.AddText(segment.tokens);
        break;
      case Modality::kVision: {
        absl::StatusOr<ContentRef> frame = frame_of(segment.camera);
        RETURN_IF_ERROR(frame.status());
        builder.AddVision(segment.camera, *std::move(frame), spec.vision_tokens);
        break;
      }
      case Modality::kState:
        if (state == nullptr) return absl::InternalError("a prompt has a state that is not there");
        builder.AddState(state);
        break;
      case Modality::kAction:
        builder.AddPlaces(segment.rows);
        break;
    }
    if (++number == prompt.bidirectional) builder.EndGroup();
  }
  return absl::OkStatus();
}

}  // namespace saccade
