#pragma once
// Timeline: what a prompt is made of, cut into blocks with their keys. Immutable, built once off
// the engine thread.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/content.h"
#include "base/digest.h"
#include "base/modality.h"

namespace saccade {

// A robot's state, normalised for the model: what one row of a prompt is made of.
using StateRef = std::shared_ptr<const std::vector<float>>;

// Tokens [begin, end) of one modality; positions equal token indices.
struct Segment {
  Modality modality = Modality::kText;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t camera = 0;   // kVision
  ContentRef content{};  // kVision: the frame
  StateRef state{};      // kState: one row
};

// Which of a prompt's blocks a sequence may take over from the cache.
enum class PrefixReuse : uint8_t {
  kAllButLast,  // the last row must run: what comes out of it is the answer's first token
  kAll,         // only the K/V is wanted
  kNone,        // hidden states of the prompt are wanted; its blocks are offered to nobody either
};

// One block of K/V: tokens [begin, begin + len) of one segment. Its key chains over everything
// before it.
struct TimelineBlock {
  // Domain "kv.block.v1": salt, parent key, modality, position, and token ids (text), frame digest,
  // camera, range and length of the segment (vision), values (state) or length (places of the
  // answer). Every field is tagged and length-prefixed; the modality comes before the fields that
  // depend on it, so a text and a vision block never hash the same bytes. The parent of a group's
  // first block is a digest of the whole group.
  Digest128 key;
  uint32_t begin = 0;
  uint16_t len = 0;      // 1 .. block_tokens; part-full where a segment ends
  uint32_t segment = 0;  // index into segments()
};

class Timeline {
 public:
  std::span<const Segment> segments() const { return segments_; }
  std::span<const TimelineBlock> blocks() const { return blocks_; }
  // Tokens [0, group_tokens()) see each other in full (prefix-LM), so each of them depends on all:
  // they are keyed as a whole. Those after it are causal. 0: all are.
  uint32_t group_tokens() const { return group_tokens_; }
  uint32_t group_blocks() const { return group_blocks_; }
  // The last token that token `t` sees.
  uint32_t Sees(uint32_t t) const { return t < group_tokens_ ? group_tokens_ - 1 : t; }
  PrefixReuse reuse() const { return reuse_; }
  // Ids of all tokens; 0 where the token is not text.
  std::span<const int32_t> tokens() const { return tokens_; }
  uint32_t num_tokens() const { return static_cast<uint32_t>(tokens_.size()); }
  uint32_t block_tokens() const { return block_tokens_; }
  const Digest128& salt() const { return salt_; }
  // Whose partition holds the tokens past the prompt: action tokens, or generated text.
  Modality answer() const { return answer_; }
  // Exact content equality of block i of both (parents, and the rest of its group, included by the
  // caller's walk). Frames are interned, so theirs are compared by address; a missing frame equals
  // nothing.
  static bool SameContent(const Timeline& a, const Timeline& b, uint32_t block);

 private:
  friend class TimelineBuilder;
  friend class TimelineTestPeer;
  std::vector<Segment> segments_;
  std::vector<TimelineBlock> blocks_;
  std::vector<int32_t> tokens_;
  Digest128 salt_;
  uint32_t block_tokens_ = 1;
  uint32_t group_tokens_ = 0;
  uint32_t group_blocks_ = 0;
  Modality answer_ = Modality::kAction;
  PrefixReuse reuse_ = PrefixReuse::kAllButLast;
};

// Each Add makes one segment, which starts a new block; an empty one adds nothing.
class TimelineBuilder {
 public:
  // `salt` separates what must never share: model fingerprint, precision, tenant. `block_tokens`
  // must be that of the cache (1 .. 65535; others are clamped).
  TimelineBuilder(const Digest128& salt, uint32_t block_tokens);
  TimelineBuilder& AddText(std::span<const int32_t> ids);
  TimelineBuilder& AddVision(uint32_t camera, ContentRef content, uint32_t num_tokens);
  // One row made of a state.
  TimelineBuilder& AddState(StateRef state);
  // Rows of the prompt in whose places the answer stands.
  TimelineBuilder& AddPlaces(uint32_t count);
  // What was added so far is one group.
  TimelineBuilder& EndGroup();
  TimelineBuilder& SetReuse(PrefixReuse reuse);
  // What follows the prompt; no part of any key, so prompts are shared whatever is asked of them.
  TimelineBuilder& SetAnswer(Modality answer);
  // Never null. The builder is empty afterwards and may be used again.
  std::shared_ptr<const Timeline> Build();

 private:
  TimelineBuilder& Add(Segment segment, uint32_t count);

  Digest128 salt_;
  uint32_t block_tokens_;
  std::shared_ptr<Timeline> timeline_;
};

}  // namespace saccade
