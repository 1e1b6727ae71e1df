#pragma once
// CostTable: step times that were learned, by what they were learned on; and its file. Any thread.
//
// The file is text: a line "saccade-costs 1 DIGEST", the digest of all that follows, then a line
// per model and backend: its key and the numbers of CostModel::Save.
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/digest.h"
#include "base/status.h"
#include "model/model.h"
#include "sched/cost_model.h"
#include "tensor/backend.h"

namespace saccade {

// By CostKey.
using CostTable = std::unordered_map<Digest128, CostModel>;

// Step times depend on the model, its weights and compute type, and on the device, its instruction
// set and threads.
Digest128 CostKey(const ModelSpec& spec, const Backend& backend);

inline constexpr size_t kMaxCostEntries = 256;
inline constexpr size_t kMaxCostBytes = size_t{4} << 20;

// The same bytes for the same table.
std::string WriteCostTable(const CostTable& table);
// DATA_LOSS for bytes that WriteCostTable did not write, of this version.
absl::StatusOr<CostTable> ReadCostTable(std::string_view text);

// NOT_FOUND: there is no such file.
absl::StatusOr<CostTable> LoadCostFile(const std::string& path);
// Replaces the file in one step: whoever reads it sees the old table or the new one.
absl::Status SaveCostFile(const std::string& path, const CostTable& table);

}  // namespace saccade
