// Any bytes are a file of step times: refused, or every model in it predicts times and is written
// back as the same numbers. The digest is made to fit, so that the rest is reached.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "engine/cost_table.h"

namespace {

std::string WithDigest(std::string_view body) {
  const saccade::Digest128 digest = saccade::DigestBytes(
      "cost.file.v1", {reinterpret_cast<const uint8_t*>(body.data()), body.size()});
  std::string text = "saccade-costs 1 ";
  for (const uint64_t half : {digest.high, digest.low}) {
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[half >> shift & 15];
  }
  return text + "\n" + std::string(body);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (saccade::ReadCostTable(bytes).ok() && !bytes.starts_with("saccade-costs 1 ")) std::abort();
  auto table = saccade::ReadCostTable(WithDigest(bytes));
  if (!table.ok()) return 0;
  for (auto& [key, model] : *table) {
    const saccade::CostPrediction p = model.Predict({3, 300, 7});
    if (p.p50.count() < 0 || p.p99 < p.p50) std::abort();
    saccade::CostModel copy = model;
    copy.Observe({1, 20, 1}, saccade::Micros(2000));
    if (copy.Predict({3, 300, 7}).p50.count() < 0) std::abort();
  }
  const auto again = saccade::ReadCostTable(saccade::WriteCostTable(*table));
  if (!again.ok() || again->size() != table->size()) std::abort();
  for (const auto& [key, model] : *table) {
    if (again->at(key).Save() != model.Save()) std::abort();
  }
  return 0;
}
