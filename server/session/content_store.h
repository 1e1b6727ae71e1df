#pragma once
// ContentStore: makes equal frames one object, so that the core compares pointers. Holds no frame
// alive: a frame lives as long as a session, a timeline or a cache entry names it.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/content.h"

namespace saccade {

// Digest of a frame: domain "frame.v1" over width, height and the pixels.
Digest128 FrameDigest(uint32_t width, uint32_t height, const Pixels& rgb);

// Any thread.
class ContentStore {
 public:
  // `max_entries`: frames known at a time. A frame beyond it is still served, it is only not shared
  // with its equals.
  explicit ContentStore(size_t max_entries) : max_entries_(max_entries) {}
  ContentStore(const ContentStore&) = delete;
  ContentStore& operator=(const ContentStore&) = delete;

  // The one object for these pixels: width * height * 3 values of any type.
  // `memory` goes with them, or back when the frame is known already.
  ContentRef Intern(uint32_t width, uint32_t height, Pixels rgb, MemoryHold memory = {});
  // Frames known now, expired ones that were not swept yet included.
  size_t size() const;

 private:
  static constexpr size_t kFirstSweep = 64;
  void Sweep();

  const size_t max_entries_;
  mutable std::mutex mu_;
  // Several entries per digest: equal digests of different bytes stay different frames.
  std::unordered_multimap<Digest128, std::weak_ptr<const Content>> entries_;
  size_t sweep_at_ = kFirstSweep;
};

}  // namespace saccade
