#include "kv/timeline.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

namespace saccade {
namespace {

std::string_view BytesOf(const Segment& segment) {
  if (segment.state == nullptr) return {};
  return {reinterpret_cast<const char*>(segment.state->data()),
          segment.state->size() * sizeof(float)};
}

Digest128 BlockKey(const Timeline& timeline, const TimelineBlock& block, const Digest128& parent) {
  const Segment& segment = timeline.segments()[block.segment];
  DigestBuilder builder("kv.block.v1");
  builder.Field(timeline.salt())
      .Field(parent)
      .Field(static_cast<uint64_t>(segment.modality))
      .Field(static_cast<uint64_t>(block.begin));
  if (segment.modality == Modality::kVision) {
    builder.Field(segment.content ? segment.content->digest : Digest128{})
        .Field(static_cast<uint64_t>(segment.camera))
        .Field(static_cast<uint64_t>(block.begin - segment.begin))
        .Field(static_cast<uint64_t>(block.len))
        .Field(static_cast<uint64_t>(segment.end - segment.begin));
  } else if (segment.modality == Modality::kState) {
    builder.Field(BytesOf(segment));
  } else if (segment.modality == Modality::kAction) {
    builder.Field(static_cast<uint64_t>(segment.end - segment.begin));
  } else {
    builder.Field(timeline.tokens().subspan(block.begin, block.len));
  }
  return builder.Finish();
}

}  // namespace

bool Timeline::SameContent(const Timeline& a, const Timeline& b, uint32_t block) {
  if (block >= a.blocks_.size() || block >= b.blocks_.size() || a.salt_ != b.salt_ ||
      a.group_tokens_ != b.group_tokens_) {
    return false;
  }
  const TimelineBlock& x = a.blocks_[block];
  const TimelineBlock& y = b.blocks_[block];
  if (x.begin != y.begin || x.len != y.len) return false;
  const Segment& p = a.segments_[x.segment];
  const Segment& q = b.segments_[y.segment];
  if (p.modality != q.modality) return false;
  if (p.modality == Modality::kVision) {
    return p.content != nullptr && p.content == q.content && p.camera == q.camera &&
           p.begin == q.begin && p.end == q.end;
  }
  if (p.modality == Modality::kState) {
    return p.state != nullptr && q.state != nullptr && BytesOf(p) == BytesOf(q);
  }
  if (p.modality == Modality::kAction) return p.begin == q.begin && p.end == q.end;
  return std::equal(a.tokens_.begin() + x.begin, a.tokens_.begin() + x.begin + x.len,
                    b.tokens_.begin() + y.begin);
}

TimelineBuilder::TimelineBuilder(const Digest128& salt, uint32_t block_tokens)
    : salt_(salt),
      block_tokens_(std::clamp<uint32_t>(block_tokens, 1, std::numeric_limits<uint16_t>::max())),
      timeline_(std::make_shared<Timeline>()) {}

TimelineBuilder& TimelineBuilder::Add(Segment segment, uint32_t count) {
  if (count == 0) return *this;
  segment.begin = timeline_->num_tokens();
  segment.end = segment.begin + count;
  timeline_->tokens_.resize(segment.end, 0);
  timeline_->segments_.push_back(std::move(segment));
  return *this;
}

TimelineBuilder& TimelineBuilder::AddText(std::span<const int32_t> ids) {
  Add({.modality = Modality::kText}, static_cast<uint32_t>(ids.size()));
  std::copy(ids.begin(), ids.end(),
            timeline_->tokens_.end() - static_cast<std::ptrdiff_t>(ids.size()));
  return *this;
}

TimelineBuilder& TimelineBuilder::AddVision(uint32_t camera, ContentRef content,
                                            uint32_t num_tokens) {
  return Add({.modality = Modality::kVision, .camera = camera, .content = std::move(content)},
             num_tokens);
}

TimelineBuilder& TimelineBuilder::AddState(StateRef state) {
  return Add({.modality = Modality::kState, .state = std::move(state)}, 1);
}

TimelineBuilder& TimelineBuilder::AddPlaces(uint32_t count) {
  return Add({.modality = Modality::kAction}, count);
}

TimelineBuilder& TimelineBuilder::EndGroup() {
  timeline_->group_tokens_ = timeline_->num_tokens();
  return *this;
}

TimelineBuilder& TimelineBuilder::SetReuse(PrefixReuse reuse) {
  timeline_->reuse_ = reuse;
  return *this;
}

TimelineBuilder& TimelineBuilder::SetAnswer(Modality answer) {
  timeline_->answer_ = answer;
  return *this;
}

std::shared_ptr<const Timeline> TimelineBuilder::Build() {
  std::shared_ptr<Timeline> timeline = std::exchange(timeline_, std::make_shared<Timeline>());
  timeline->salt_ = salt_;
  timeline->block_tokens_ = block_tokens_;
  for (uint32_t s = 0; s < timeline->segments_.size(); ++s) {
    const Segment& segment = timeline->segments_[s];
    for (uint32_t begin = segment.begin; begin < segment.end;) {
      TimelineBlock block;
      block.begin = begin;
      block.len = static_cast<uint16_t>(std::min(block_tokens_, segment.end - begin));
      block.segment = s;
      begin += block.len;
      timeline->blocks_.push_back(block);
      if (begin <= timeline->group_tokens_) ++timeline->group_blocks_;
    }
  }
  // Keys of a group once without it, for its digest, and then on top of that.
  Digest128 parent;
  const auto chain = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      TimelineBlock& block = timeline->blocks_[i];
      block.key = BlockKey(*timeline, block, parent);
      parent = block.key;
    }
  };
  if (timeline->group_blocks_ > 0) {
    chain(0, timeline->group_blocks_);
    parent = DigestBuilder("kv.group.v1").Field(parent).Field(timeline->group_tokens_).Finish();
  }
  chain(0, timeline->blocks_.size());
  return timeline;
}

}  // namespace saccade
