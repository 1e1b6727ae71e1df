#pragma once
// Reads files that prove who somebody is: certificates, keys, tokens.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace saccade {

enum class Secrecy : uint8_t {
  kPublic,
  kSecret,  // refused when everybody may read or write it; a warning when its group may
};

// The file's text, at most `max_bytes`. INVALID_ARGUMENT "key: path: ..." names the configuration's
// key: not there, not readable, no regular file, too large, empty, open to everybody.
absl::StatusOr<std::string> ReadCredentialFile(std::string_view key, const std::string& path,
                                               Secrecy secrecy, size_t max_bytes);

}  // namespace saccade
