#pragma once
// YAML text as a plain tree with line numbers, bounded in size and depth. Values stay text: no
// conversion of yaml-cpp is used, because it reads 010 as 8 and -1 as a huge unsigned number.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace saccade {

struct YamlNode {
  enum class Kind : uint8_t { kNull, kPlain, kQuoted, kSequence, kMap };
  Kind kind = Kind::kNull;
  int line = 0;                    // 1-based
  std::string value;               // of a scalar
  std::vector<std::string> keys;   // of a map, in file order, without repetition
  std::vector<int> key_lines;      // beside `keys`
  std::vector<YamlNode> children;  // of a map or a sequence

  // The child under `key`, or nullptr; also nullptr when this is no map.
  const YamlNode* Find(std::string_view key) const;
  int LineOf(std::string_view key) const;  // of the key itself, or of this node when it is absent
};

// One document. Refused with INVALID_ARGUMENT "file:line: ...": malformed YAML, repeated keys, keys
// that are not text, anchors, aliases and explicit tags, a second document, more than
// kMaxConfigBytes or kMaxConfigDepth, no content.
absl::StatusOr<YamlNode> ParseYamlTree(std::string_view text, std::string_view file_name);

// INVALID_ARGUMENT "file:line: message".
absl::Status FileError(std::string_view file_name, int line, std::string_view message);

// Text made safe for a one-line message: control bytes escaped, at most 60 bytes.
std::string Printable(std::string_view text);

}  // namespace saccade
