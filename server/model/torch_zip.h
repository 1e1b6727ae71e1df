#pragma once
// The zip around a torch file: where its entries lie. See torch_file.h.
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace saccade {

struct ZipEntry {
  size_t offset = 0;  // of its bytes, from the start of the file
  size_t bytes = 0;
};

// Entries by name, without the one folder that all of them are in. `origin` is for errors.
// INVALID_ARGUMENT: not a zip, entries outside of the file or over each other, a name twice, names
// in several folders or that climb out of theirs. UNIMPLEMENTED: compressed, encrypted, zip64.
absl::StatusOr<std::map<std::string, ZipEntry, std::less<>>> ReadZip(std::span<const uint8_t> bytes,
                                                                     std::string_view origin);

}  // namespace saccade
