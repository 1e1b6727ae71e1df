#pragma once
// Packed weights and K/V storage of the CPU backend. Layouts: kernels/cpu/api.h.
#include <cstdint>
#include <utility>

#include "backend/cpu/memory.h"
#include "kernels/cpu/api.h"
#include "tensor/backend.h"

namespace saccade::cpu {

inline Type TypeOf(DType dtype) { return dtype == DType::kF32 ? Type::kF32 : Type::kBf16; }

class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(Memory memory, MemKind kind) : memory_(std::move(memory)), kind_(kind) {}
  std::byte* data() const override { return memory_.data(); }
  size_t size() const override { return memory_.size(); }
  MemKind kind() const override { return kind_; }

 private:
  Memory memory_;
  MemKind kind_;
};

class CpuPackedWeight final : public PackedWeight {
 public:
  CpuPackedWeight(int64_t n, int64_t k, DType dtype, bool gated, int64_t panels, Isa isa,
                  Memory memory)
      : n_(n),
        k_(k),
        dtype_(dtype),
        gated_(gated),
        panels_(panels),
        isa_(isa),
        memory_(std::move(memory)) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  DType dtype() const override { return dtype_; }
  size_t bytes() const override { return memory_.size(); }
  bool gated() const { return gated_; }
  int64_t panels() const { return panels_; }
  Isa isa() const { return isa_; }  // whose layout it has
  const std::byte* data() const { return memory_.data(); }

 private:
  int64_t n_;
  int64_t k_;
  DType dtype_;
  bool gated_;
  int64_t panels_;
  Isa isa_;
  Memory memory_;
};

// [block][layer][K of all heads, then V of all heads], so that a block is one run of bytes.
class CpuKvStorage final : public KvStorage {
 public:
  // RESOURCE_EXHAUSTED, or INVALID_ARGUMENT for a geometry that the kernels cannot hold.
  static absl::StatusOr<std::unique_ptr<CpuKvStorage>> Make(const Kernels& kernels,
                                                            const KvGeometry& geometry,
                                                            uint32_t num_blocks);
  const KvGeometry& geometry() const override { return geometry_; }
  Isa isa() const { return isa_; }  // whose layout it has
  uint32_t num_blocks() const override { return num_blocks_; }
  KvLayout Layer(uint32_t layer) const;
  size_t block_bytes() const { return layer_bytes_ * geometry_.layers; }
  std::byte* block(int64_t index) const {
    return memory_.data() + static_cast<size_t>(index) * block_bytes();
  }

 private:
  explicit CpuKvStorage(Isa isa) : isa_(isa) {}

  Isa isa_;
  KvGeometry geometry_;
  uint32_t num_blocks_ = 0;
  KvLayout layout_{};  // of layer 0
  size_t layer_bytes_ = 0;
  Memory memory_;
};

// The layout of one layer for `heads` heads of `head_dim`; base and block_stride are the caller's
// to set.
KvLayout MakeKvLayout(const Kernels& kernels, int64_t heads, int64_t head_dim, Type type);

}  // namespace saccade::cpu
