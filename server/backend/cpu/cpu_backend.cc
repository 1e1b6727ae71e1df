#include "backend/cpu/cpu_backend.h"

#include <array>
#include <atomic>
#include <span>
#include <string>
#include <utility>

#include "backend/cpu/core.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/storage.h"
#include "backend/cpu/stream.h"
#include "base/cores.h"
#include "base/strings.h"

namespace saccade {
namespace {

using cpu::Kernels;
using cpu::Memory;
using cpu::PanelLayout;
using cpu::Type;
using cpu::WeightColumn;

absl::Status CheckPart(const TensorView& part, int64_t k, std::string_view op) {
  const bool fits = part.mem != MemKind::kDevice && part.rank == 2 && part.dims[0] > 0 && k > 0 &&
                    part.dims[1] == k && part.strides[1] == 1 && part.strides[0] >= k &&
                    (part.dtype == DType::kF32 || part.dtype == DType::kBf16);
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      StrCat(op, ": ", part.DebugString(), " must be host memory, f32 or bf16, [n, ", k, "]"));
}

std::vector<WeightColumn> Columns(std::span<const TensorView> parts) {
  std::vector<WeightColumn> columns;
  for (const TensorView& part : parts) {
    for (int64_t row = 0; row < part.dims[0]; ++row) {
      columns.push_back({part.Rows(row, row + 1).data, cpu::TypeOf(part.dtype)});
    }
  }
  return columns;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::shared_ptr<cpu::Core> core) : core_(std::move(core)) {}

  std::string_view kind() const override { return "cpu"; }
  std::string Describe() const override {
    return StrCat("cpu: ", cpu::IsaName(core_->kernels().isa), ", ", core_->threads(),
                  core_->threads() == 1 ? " thread" : " threads");
  }
  const Ops& ops() const override { return ops_; }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes, MemKind kind) override {
    ASSIGN_OR_RETURN(Memory memory, Memory::Allocate(bytes));
    return std::make_unique<cpu::CpuBuffer>(std::move(memory), kind);
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override {
    return std::make_unique<cpu::CpuStream>(core_);
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackLinear(std::span<const TensorView> parts,
                                                           DType dtype) override {
    if (parts.empty()) return absl::InvalidArgumentError("PackLinear: no parts");
    const int64_t k = parts[0].dims[1];
    for (const TensorView& part : parts) RETURN_IF_ERROR(CheckPart(part, k, "PackLinear"));
    const std::vector<WeightColumn> columns = Columns(parts);
    return Pack(columns, static_cast<int64_t>(columns.size()), k, dtype, false);
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackGated(TensorView gate, TensorView up,
                                                          DType dtype) override {
    RETURN_IF_ERROR(CheckPart(gate, gate.dims[1], "PackGated"));
    RETURN_IF_ERROR(CheckPart(up, gate.dims[1], "PackGated"));
    if (gate.dims[0] != up.dims[0]) {
      return absl::InvalidArgumentError(
          StrCat("PackGated: gate ", gate.DebugString(), " and up ", up.DebugString(), " differ"));
    }
    // A run of gate columns, then the same run of up columns, each filled up with zeros.
    const int64_t run = Layout(dtype).interleave;
    const std::vector<WeightColumn> gates = Columns({&gate, 1});
    const std::vector<WeightColumn> ups = Columns({&up, 1});
    const auto count = static_cast<int64_t>(gates.size());
    std::vector<WeightColumn> columns;
    for (int64_t begin = 0; begin < count; begin += run) {
      for (const auto* side : {&gates, &ups}) {
        for (int64_t i = begin; i < begin + run; ++i) {
          columns.push_back(i < count ? (*side)[static_cast<size_t>(i)]
                                      : WeightColumn{nullptr, Type::kF32});
        }
      }
    }
    return Pack(columns, 2 * count, gate.dims[1], dtype, true);
  }

  absl::StatusOr<std::unique_ptr<KvStorage>> NewKvStorage(const KvGeometry& geometry,
                                                          uint32_t num_blocks) override {
    return cpu::CpuKvStorage::Make(core_->kernels(), geometry, num_blocks);
  }
  uint64_t KvBytes(const KvGeometry& geometry, uint32_t num_blocks) const override {
    const cpu::KvLayout layout = cpu::MakeKvLayout(core_->kernels(), geometry.kv_heads,
                                                   geometry.head_dim, cpu::TypeOf(geometry.dtype));
    return uint64_t{num_blocks} * geometry.layers * layout.block_stride;
  }
  void BeginServing() override { serving_.store(true, std::memory_order_relaxed); }

 private:
  const PanelLayout& Layout(DType dtype) const {
    const Kernels& kernels = core_->kernels();
    return dtype == DType::kF32 ? kernels.f32_layout : kernels.bf16_layout;
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(const std::vector<WeightColumn>& columns,
                                                     int64_t n, int64_t k, DType dtype,
                                                     bool gated) {
    if (dtype != DType::kF32 && dtype != DType::kBf16) {
      return absl::InvalidArgumentError(StrCat("PackLinear: dtype ", DTypeName(dtype)));
    }
    const PanelLayout& layout = Layout(dtype);
    const Type type = cpu::TypeOf(dtype);
    const auto width = static_cast<size_t>(layout.panel);
    const size_t panels = (columns.size() + width - 1) / width;
    const size_t panel_bytes = cpu::PanelBytes(layout, type, k);
    ASSIGN_OR_RETURN(Memory memory, Memory::Allocate(panels * panel_bytes));
    std::vector<WeightColumn> padded = columns;
    padded.resize(panels * width, WeightColumn{nullptr, Type::kF32});
    const auto pack = [&](int64_t panel, void*) {
      const auto at = static_cast<size_t>(panel);
      cpu::PackPanel(layout, type, padded.data() + at * width, k, memory.data() + at * panel_bytes);
    };
    if (serving_.load(std::memory_order_relaxed)) {
      for (size_t panel = 0; panel < panels; ++panel) pack(static_cast<int64_t>(panel), nullptr);
    } else {
      const std::lock_guard lock(core_->mutex());
      core_->ParallelFor(static_cast<int64_t>(panels), pack);
    }
    return std::make_unique<cpu::CpuPackedWeight>(n, k, dtype, gated, static_cast<int64_t>(panels),
                                                  core_->kernels().isa, std::move(memory));
  }

  const std::shared_ptr<cpu::Core> core_;
  const cpu::CpuOps ops_;
  std::atomic<bool> serving_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuOptions& options) {
  const Kernels* kernels = cpu::FindKernels(options.isa);
  if (kernels == nullptr && options.isa == Isa::kAuto) {
    return absl::FailedPreconditionError(
        "cpu: this machine lacks AVX2, FMA or F16C; use `backend: ref`");
  }
  if (kernels == nullptr) {
    return absl::FailedPreconditionError(
        StrCat("cpu: this machine does not offer ", cpu::IsaName(options.isa)));
  }
  ThreadPool::Options pool_options;
  pool_options.threads = options.threads == 0 ? UsableCores() : options.threads;
  pool_options.cpus = options.cpus;
  ASSIGN_OR_RETURN(std::unique_ptr<ThreadPool> pool, ThreadPool::Create(pool_options));
  std::vector<Memory> scratch;
  for (int thread = 0; thread < pool->threads(); ++thread) {
    ASSIGN_OR_RETURN(Memory memory, Memory::Allocate(cpu::kScratchBytes));
    scratch.push_back(std::move(memory));
  }
  return std::make_unique<CpuBackend>(
      std::make_shared<cpu::Core>(*kernels, std::move(pool), std::move(scratch)));
}

}  // namespace saccade
