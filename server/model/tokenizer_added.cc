#include "model/tokenizer_added.h"

#include <algorithm>

namespace saccade {
namespace {

constexpr size_t kMaxNodes = 1 << 19;

template <class Children>
uint32_t Child(const Children& children, unsigned char byte) {
  const auto it = std::find_if(children.begin(), children.end(),
                               [byte](const auto& child) { return child.first == byte; });
  return it == children.end() ? 0 : it->second;
}

}  // namespace

bool TokenMatcher::Add(std::string_view pattern, int32_t id, bool special) {
  if (pattern.empty()) return true;
  if (nodes_.size() + pattern.size() > kMaxNodes) return false;
  uint32_t node = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const auto byte = static_cast<unsigned char>(pattern[i]);
    uint32_t next = i == 0 ? first_[byte] : Child(nodes_[node].children, byte);
    if (next == 0) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
      if (i == 0) {
        first_[byte] = next;
      } else {
        nodes_[node].children.emplace_back(byte, next);
      }
    }
    node = next;
  }
  nodes_[node].terminal = true;
  nodes_[node].special = special;
  nodes_[node].id = id;
  return true;
}

TokenMatcher::Match TokenMatcher::LongestAt(std::string_view text, size_t position) const {
  Match match;
  uint32_t node = first_[static_cast<unsigned char>(text[position])];
  for (size_t i = position + 1; node != 0; ++i) {
    const Node& n = nodes_[node];
    if (n.terminal) match = {i - position, n.id, n.special};
    if (i >= text.size()) break;
    node = Child(n.children, static_cast<unsigned char>(text[i]));
  }
  return match;
}

}  // namespace saccade
