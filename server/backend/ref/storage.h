#pragma once
// Packed weights and K/V storage of the reference backend.
#include <cstdint>
#include <memory>
#include <utility>

#include "backend/ref/memory.h"

namespace saccade::ref {

// W^T as F32 [k, n], so that a row of products is accumulated over k with n side by side; BF16
// weights hold BF16 values.
struct WeightData {
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kF32;  // compute dtype
  bool gated = false;         // columns [0, n/2) are the gate, [n/2, n) the up projection
  std::shared_ptr<Memory> memory;
  const float* transposed() const { return reinterpret_cast<const float*>(memory->bytes()); }
};

class RefPackedWeight final : public PackedWeight {
 public:
  explicit RefPackedWeight(WeightData data) : data_(std::move(data)) {}
  ~RefPackedWeight() override { data_.memory->Release(); }
  int64_t n() const override { return data_.n; }
  int64_t k() const override { return data_.k; }
  DType dtype() const override { return data_.dtype; }
  size_t bytes() const override { return data_.memory->size(); }
  const WeightData& data() const { return data_; }

 private:
  WeightData data_;
};

// [layer][block][k or v][token][kv_heads * head_dim] of geometry.dtype.
struct KvData {
  KvGeometry geometry;
  uint32_t num_blocks = 0;
  std::shared_ptr<Memory> memory;

  size_t row_bytes() const {
    return size_t{geometry.kv_heads} * geometry.head_dim * DTypeSize(geometry.dtype);
  }
  size_t block_bytes() const { return 2 * geometry.block_tokens * row_bytes(); }  // of one layer
  std::byte* block(uint32_t layer, uint32_t block) const {
    return memory->bytes() + (size_t{layer} * num_blocks + block) * block_bytes();
  }
  std::byte* key(uint32_t layer, uint32_t block_id, uint32_t token) const {
    return block(layer, block_id) + token * row_bytes();
  }
  std::byte* value(uint32_t layer, uint32_t block_id, uint32_t token) const {
    return block(layer, block_id) + (size_t{geometry.block_tokens} + token) * row_bytes();
  }
};

class RefKvStorage final : public KvStorage {
 public:
  explicit RefKvStorage(KvData data) : data_(std::move(data)) {}
  ~RefKvStorage() override { data_.memory->Release(); }
  const KvGeometry& geometry() const override { return data_.geometry; }
  uint32_t num_blocks() const override { return data_.num_blocks; }
  const KvData& data() const { return data_; }

 private:
  KvData data_;
};

}  // namespace saccade::ref
