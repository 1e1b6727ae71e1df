#pragma once
// Timeline: what a prompt is made of, cut into blocks with their keys. Immutable, built once off the engine thread.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/content.h"
#include "base/digest.h"
#include "base/modality.h"

namespace saccade {

// Tokens [begin, end) of one modality; positions equal token indices.
struct Segment {
  Modality modality = Modality::kText;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t camera = 0;   // kVision
  ContentRef content;    // kVision: the frame
};

// One block of K/V: tokens [begin, begin + len) of one segment. Its key chains over everything before it.
struct TimelineBlock {
  Digest128 key;         // domain "kv.block.v1": salt, parent key, modality, position, token ids or (frame digest, range)
  uint32_t begin = 0;
  uint16_t len = 0;      // <= block_tokens; part-full where a segment ends
  uint32_t segment = 0;  // index into segments()
};

class Timeline {
 public:
  std::span<const Segment> segments() const { return segments_; }
  std::span<const TimelineBlock> blocks() const { return blocks_; }
  // Ids of all tokens; 0 where the token is not text.
  std::span<const int32_t> tokens() const { return tokens_; }
  uint32_t num_tokens() const { return static_cast<uint32_t>(tokens_.size()); }
  const Digest128& salt() const { return salt_; }
  // Exact content equality of block i of both (parents included by the caller's walk from block 0).
  static bool SameContent(const Timeline& a, const Timeline& b, uint32_t block);

 private:
  friend class TimelineBuilder;
  std::vector<Segment> segments_;
  std::vector<TimelineBlock> blocks_;
  std::vector<int32_t> tokens_;
  Digest128 salt_;
};

class TimelineBuilder {
 public:
  // `salt` separates what must never share: model fingerprint, precision, tenant.
  TimelineBuilder(const Digest128& salt, uint32_t block_tokens);
  TimelineBuilder& AddText(std::span<const int32_t> ids);
  TimelineBuilder& AddVision(uint32_t camera, ContentRef content, uint32_t num_tokens);
  std::shared_ptr<const Timeline> Build();

 private:
  Digest128 salt_;
  uint32_t block_tokens_;
  std::shared_ptr<Timeline> timeline_;
};

}  // namespace saccade
