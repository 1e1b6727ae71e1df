// Any bytes are an instruction: refused when they are not UTF-8, else lower-cased once and for all,
// and a prompt whose ids are in the vocabulary.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/lowercase.h"
#include "model/families/openvla_prompt.h"

namespace {

struct Demo {
  saccade::Checkpoint checkpoint =
      saccade::Checkpoint::Open(SACCADE_SOURCE_DIR "/deploy/demo/checkpoint").value();
  saccade::OpenVlaConfig config =
      saccade::ReadOpenVlaConfig(checkpoint, saccade::Preprocessor::Load(checkpoint).value())
          .value();
  saccade::OpenVlaPrompt prompt = saccade::OpenVlaPrompt::Load(checkpoint, config).value();
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Demo demo;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const bool valid = saccade::IsValidUtf8(text);
  const auto lower = saccade::LowerCase(text);
  const auto ids = demo.prompt.Encode(text);
  if (lower.ok() != valid || ids.ok() != valid) std::abort();
  if (!valid) return 0;
  if (!saccade::IsValidUtf8(*lower)) std::abort();
  const auto again = saccade::LowerCase(*lower);
  if (!again.ok() || *again != *lower) std::abort();
  if (ids->empty() || ids->front() != demo.prompt.bos()) std::abort();
  for (const int32_t id : *ids) {
    if (id < 0 || id >= static_cast<int32_t>(demo.config.llama.vocab)) std::abort();
  }
  return 0;
}
