#include "session/content_store.h"

#include <algorithm>
#include <utility>

namespace saccade {

Digest128 FrameDigest(uint32_t width, uint32_t height, const Pixels& rgb) {
  return DigestBuilder("frame.v1")
      .Field(uint64_t{width})
      .Field(uint64_t{height})
      .Field(DigestBytes("frame.v1", rgb))
      .Finish();
}

ContentRef ContentStore::Intern(uint32_t width, uint32_t height, Pixels rgb, MemoryHold memory) {
  auto content = std::make_shared<Content>();
  content->digest = FrameDigest(width, height, rgb);
  content->width = width;
  content->height = height;
  content->rgb = std::move(rgb);
  content->memory = std::move(memory);
  // Declared before the lock: a frame whose last reference this turns out to be is freed outside of
  // it.
  std::vector<ContentRef> candidates;
  const std::lock_guard lock(mu_);
  const auto [begin, end] = entries_.equal_range(content->digest);
  for (auto it = begin; it != end; ++it) {
    ContentRef known = it->second.lock();
    if (known == nullptr) continue;
    if (known->width == width && known->height == height && known->rgb == content->rgb)
      return known;
    candidates.push_back(std::move(known));
  }
  if (entries_.size() >= sweep_at_) Sweep();
  if (entries_.size() < max_entries_) entries_.emplace(content->digest, content);
  return content;
}

size_t ContentStore::size() const {
  const std::lock_guard lock(mu_);
  return entries_.size();
}

void ContentStore::Sweep() {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
  // Doubling keeps the cost of a sweep constant per frame.
  sweep_at_ = std::max(kFirstSweep, std::min(2 * entries_.size(), max_entries_));
}

}  // namespace saccade
