#include "engine/page_guard.h"

#include <algorithm>

#include "base/strings.h"

namespace saccade {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x ^ (x >> 31)) | 1;  // never 0
}

absl::Status Wrong(const TrunkItem& item, uint32_t token, std::string_view what) {
  int32_t block = -1;
  for (const PageRef& page : item.pages) {
    if (token >= page.position && token < page.position + page.len) block = page.block.value();
  }
  return absl::InternalError(StrCat("page check: request ", item.request.value(), ", token ", token,
                                    " in block ", block, ": ", what));
}

}  // namespace

PageGuard::PageGuard(uint32_t num_blocks, uint32_t block_tokens, uint32_t embedding_slots,
                     uint32_t sequence_slots)
    : num_blocks_(num_blocks),
      block_tokens_(block_tokens),
      keys_(size_t{num_blocks} * block_tokens),
      frames_(embedding_slots),
      last_(sequence_slots) {}

uint64_t PageGuard::PromptKey(const Timeline& timeline, uint32_t block, uint32_t token) {
  const TimelineBlock& b = timeline.blocks()[block];
  return Mix(Mix(b.key.low, b.key.high), token - b.begin);
}

// Where the plan says that the token is; null when it says nothing, or nothing possible.
PageGuard::Key* PageGuard::At(const TrunkItem& item, uint32_t token) {
  const auto page = std::upper_bound(item.pages.begin(), item.pages.end(), token,
                                     [](uint32_t t, const PageRef& p) { return t < p.position; });
  if (page == item.pages.begin()) return nullptr;
  const PageRef& p = *std::prev(page);
  const uint32_t offset = token - p.position;
  if (offset >= std::min<uint32_t>(p.len, block_tokens_) || !p.block.valid() ||
      static_cast<uint32_t>(p.block.value()) >= num_blocks_) {
    return nullptr;
  }
  return &keys_[static_cast<size_t>(p.block.value()) * block_tokens_ + offset];
}

absl::Status PageGuard::Note(const TrunkItem& item, const Sampled& sampled) {
  const Timeline& timeline = *item.timeline;
  const uint32_t prompt = timeline.num_tokens();
  const uint32_t end = item.begin + item.count;
  uint32_t block = 0;
  for (uint32_t t = item.begin; t < end; ++t) {
    Key* const key = At(item, t);
    if (key == nullptr) return Wrong(item, t, "it is to be written, and has no place");
    if (t < prompt) {
      while (t >= timeline.blocks()[block].begin + timeline.blocks()[block].len) ++block;
      *key = {PromptKey(timeline, block, t), 0};
      continue;
    }
    const Key* const before = t == 0 ? nullptr : At(item, t - 1);
    if (before == nullptr || before->own == 0) {
      return Wrong(item, t, "nothing was written before it");
    }
    const uint32_t known = t - item.begin;
    const int32_t value = known < item.known_tokens.size() ? item.known_tokens[known]
                                                           : sampled(item.slot, t - prompt);
    *key = {Mix(Mix(before->own, item.request.value()), static_cast<uint32_t>(value)), before->own};
  }
  return absl::OkStatus();
}

absl::Status PageGuard::CheckReads(const TrunkItem& item) {
  const Timeline& timeline = *item.timeline;
  const uint32_t prompt = timeline.num_tokens();
  const uint32_t end = item.begin + item.count;
  uint64_t before = 0;
  uint32_t block = 0;
  for (uint32_t t = 0; t < end; ++t) {
    const Key* const key = At(item, t);
    if (key == nullptr) return Wrong(item, t, "the page table does not cover it");
    if (t < prompt) {
      while (t >= timeline.blocks()[block].begin + timeline.blocks()[block].len) ++block;
      if (key->own != PromptKey(timeline, block, t)) {
        return Wrong(
            item, t,
            key->own == 0 ? "the page was never written" : "the page holds another prompt");
      }
    } else if (key->own == 0 || key->before != before) {
      return Wrong(item, t,
                   key->own == 0 ? "the page was never written"
                                 : "the page does not go on with the page before it");
    }
    before = key->own;
  }
  // A sample goes on with what it has written itself. A row whose token is known was maybe another
  // beam's, or goes to a slot of its own after a preemption.
  if (end <= prompt || !item.slot.valid()) return absl::OkStatus();
  const auto slot = static_cast<size_t>(item.slot.value());
  if (slot >= last_.size()) return Wrong(item, end - 1, "it has no slot");
  Last& last = last_[slot];
  if (item.begin > prompt && item.known_tokens.empty()) {
    const Key* const key = At(item, item.begin - 1);
    if (last.request != item.request || last.token != item.begin - 1 || last.own != key->own) {
      return Wrong(item, item.begin - 1, "the page holds the answer of another sample");
    }
  }
  last = {item.request, end - 1, At(item, end - 1)->own};
  return absl::OkStatus();
}

absl::Status PageGuard::CheckEmbeddings(const TrunkItem& item) const {
  const std::span<const Segment> segments = item.timeline->segments();
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const bool read =
        s.modality == Modality::kVision && s.begin < item.begin + item.count && s.end > item.begin;
    if (!read) continue;
    const EmbeddingId slot = i < item.embeddings.size() ? item.embeddings[i] : EmbeddingId();
    if (!slot.valid() || static_cast<size_t>(slot.value()) >= frames_.size() ||
        frames_[static_cast<size_t>(slot.value())] != Frame{s.content->digest, s.camera}) {
      return absl::InternalError(StrCat("page check: request ", item.request.value(),
                                        ", embedding slot ", slot.value(),
                                        ": it holds another frame than segment ", i, " is"));
    }
  }
  return absl::OkStatus();
}

absl::Status PageGuard::Check(const StepPlan& plan, const Sampled& sampled) {
  for (const BlockCopy& copy : plan.copies) {
    const auto from = static_cast<uint32_t>(copy.from.value());
    const auto to = static_cast<uint32_t>(copy.to.value());
    if (from >= num_blocks_ || to >= num_blocks_) {
      return absl::InternalError("page check: a copy names a block that does not exist");
    }
    std::copy_n(keys_.begin() + static_cast<std::ptrdiff_t>(size_t{from} * block_tokens_),
                block_tokens_,
                keys_.begin() + static_cast<std::ptrdiff_t>(size_t{to} * block_tokens_));
  }
  for (const EncodeItem& item : plan.encodes) {
    const auto slot = static_cast<size_t>(item.slot.value());
    if (slot < frames_.size()) frames_[slot] = {item.frame->digest, item.camera};
  }
  // All writes come before the reads: in every layer rows are stored before any row attends.
  for (const TrunkItem& item : plan.trunk) RETURN_IF_ERROR(Note(item, sampled));
  for (const TrunkItem& item : plan.trunk) {
    RETURN_IF_ERROR(CheckEmbeddings(item));
    RETURN_IF_ERROR(CheckReads(item));
  }
  for (const FlowItem& item : plan.flows) {  // it reads the prompt, and writes to scratch
    TrunkItem prompt;
    prompt.request = item.request;
    prompt.timeline = item.timeline;
    prompt.begin = item.timeline->num_tokens();
    prompt.pages = item.pages;
    RETURN_IF_ERROR(CheckReads(prompt));
  }
  return absl::OkStatus();
}

}  // namespace saccade
