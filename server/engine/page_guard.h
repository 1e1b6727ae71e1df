#pragma once
// PageGuard: knows for every token slot of a device's K/V pages, and for every embedding slot, what
// was written there, and refuses a step that would read anything else than its plan means: a stale,
// foreign or freed page, a copy that was not made, an embedding of another frame. It keeps its keys
// beside the pages, on the host, and costs a few operations per token that a step reads. Worker
// thread only. For debug and sanitizer builds, and for tests.
#include <cstdint>
#include <functional>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/status.h"
#include "sched/step.h"

namespace saccade {

#ifdef SACCADE_CHECK_PAGES
inline constexpr bool kCheckPages = true;
#else
inline constexpr bool kCheckPages = false;
#endif

class PageGuard {
 public:
  PageGuard(uint32_t num_blocks, uint32_t block_tokens, uint32_t embedding_slots,
            uint32_t sequence_slots);
  // Token `index` of the answer in row `slot` of the token array, sampled by an earlier step.
  using Sampled = std::function<int32_t(SequenceSlot slot, uint32_t index)>;
  // Before the step runs: notes what it copies and writes, then checks all that it reads. INTERNAL
  // naming the request, the block and the token.
  //
  // A prompt token is known by its block's key, which chains over all content before it; an
  // answer's token by the token before it, its own id and its request. Samples of a request are
  // told apart by their slot. Beams are by their tokens alone, so pages of two beams that differ in
  // nothing before such a page are taken for each other.
  absl::Status Check(const StepPlan& plan, const Sampled& sampled);

 private:
  struct Key {
    uint64_t own = 0;     // 0: nothing was written
    uint64_t before = 0;  // of the token before it; of answers only
  };
  struct Last {  // what was written last for a slot's sample
    RequestId request;
    uint32_t token = 0;
    uint64_t own = 0;
  };
  struct Frame {
    Digest128 digest;
    uint32_t camera = 0;
    friend bool operator==(const Frame&, const Frame&) = default;
  };
  static uint64_t PromptKey(const Timeline& timeline, uint32_t block, uint32_t token);
  Key* At(const TrunkItem& item, uint32_t token);
  absl::Status Note(const TrunkItem& item, const Sampled& sampled);
  absl::Status CheckReads(const TrunkItem& item);
  absl::Status CheckEmbeddings(const TrunkItem& item) const;

  const uint32_t num_blocks_;
  const uint32_t block_tokens_;
  std::vector<Key> keys_;  // [num_blocks, block_tokens]
  std::vector<Frame> frames_;
  std::vector<Last> last_;
};

}  // namespace saccade
