// Any bytes are a tokens file: refused with a place and nothing of the content, or every entry is
// one that was written there.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "rpc/auth.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto tokens = saccade::ParseTokens(text, "f");
  if (!tokens.ok()) {
    if (tokens.status().message().substr(0, 2) != "f:") std::abort();
    return 0;
  }
  if (tokens->empty() || tokens->size() > saccade::kMaxTokens) std::abort();
  std::string again;
  for (const saccade::TokenEntry& entry : *tokens) {
    again += entry.role == saccade::Role::kAdmin ? "admin:" : "infer:";
    for (const uint8_t byte : entry.digest) {
      again += "0123456789abcdef"[byte >> 4];
      again += "0123456789abcdef"[byte & 15];
    }
    if (!entry.name.empty()) again += ":" + entry.name;
    again += "\n";
  }
  const auto read = saccade::ParseTokens(again, "f");
  if (!read.ok() || read->size() != tokens->size()) std::abort();
  for (size_t i = 0; i < read->size(); ++i) {
    const saccade::TokenEntry& a = (*tokens)[i];
    const saccade::TokenEntry& b = (*read)[i];
    if (a.role != b.role || a.digest != b.digest || a.name != b.name) std::abort();
  }
  return 0;
}
