// Any bytes are a configuration file: refused with a place in the file, or read and written back
// the same.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<saccade::Config> config = saccade::ParseConfig(text, "f.yaml");
  if (!config.ok()) {
    if (config.status().message().substr(0, 7) != "f.yaml:") std::abort();
    return 0;
  }
  const std::string written = saccade::ToYaml(*config);
  const absl::StatusOr<saccade::Config> again = saccade::ParseConfig(written, "");
  if (!again.ok() || saccade::ToYaml(*again) != written) std::abort();
  return 0;
}
