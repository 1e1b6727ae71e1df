#include "backend/cpu/core.h"

#include <utility>

#include "kernels/common/rope.h"

namespace saccade::cpu {

RopeTable::RopeTable(double theta, uint32_t head_dim) : theta_(theta), head_dim_(head_dim) {
  for (uint32_t i = 0; i < head_dim / 2; ++i) {
    inverse_frequencies_.push_back(RopeInverseFrequency(theta, head_dim, i));
  }
}

void RopeTable::Fill(int32_t position, float* row) const {
  const size_t half = inverse_frequencies_.size();
  for (size_t i = 0; i < half; ++i) {
    const RopeAngle angle = RopeAngleAt(position, inverse_frequencies_[i]);
    row[i] = angle.cos;
    row[half + i] = angle.sin;
  }
}

const float* RopeTable::Row(int32_t position, std::vector<std::unique_ptr<float[]>>& spill) {
  if (position < 0 || position >= kCached) {
    spill.push_back(std::make_unique<float[]>(head_dim_));
    Fill(position, spill.back().get());
    return spill.back().get();
  }
  const auto chunk = static_cast<size_t>(position / kChunk);
  if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
  std::unique_ptr<float[]>& rows = chunks_[chunk];
  if (rows == nullptr) {
    rows = std::make_unique<float[]>(size_t{kChunk} * head_dim_);
    for (int32_t i = 0; i < kChunk; ++i) {
      Fill(static_cast<int32_t>(chunk) * kChunk + i,
           rows.get() + static_cast<size_t>(i) * head_dim_);
    }
  }
  return rows.get() + static_cast<size_t>(position % kChunk) * head_dim_;
}

RopeTable& Core::Rope(double theta, uint32_t head_dim) {
  for (const auto& table : ropes_) {
    if (table->theta() == theta && table->head_dim() == head_dim) return *table;
  }
  ropes_.push_back(std::make_unique<RopeTable>(theta, head_dim));
  return *ropes_.back();
}

}  // namespace saccade::cpu
