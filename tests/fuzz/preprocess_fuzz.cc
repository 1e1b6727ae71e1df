// Any text as preprocessor_config.json: refused, or a preprocessor that gives its size for odd
// frames.
#include <cstdlib>

#include "model/preprocess.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto json = saccade::ParseJson({reinterpret_cast<const char*>(data), size}, "fuzz",
                                       {.max_bytes = 1 << 16});
  if (!json.ok()) return 0;
  const auto preprocessor = saccade::Preprocessor::FromJson(*json, "fuzz");
  if (!preprocessor.ok()) return 0;
  if (preprocessor->width() > 512 || preprocessor->height() > 512)
    return 0;  // slow, not interesting
  for (const auto& [width, height] : {std::pair{1U, 1U}, {1U, 300U}, {33U, 17U}}) {
    const std::vector<uint8_t> pixels(size_t{width} * height * 3, 99);
    saccade::PixelRows rows(width, height, pixels);
    const auto out = preprocessor->Apply(rows);
    if (!out.ok() || out->width != preprocessor->width() || out->height != preprocessor->height())
      std::abort();
  }
  return 0;
}
