// Llama trunks with random weights, one thread, BF16: prefill of 316 tokens and decode behind them.
// The ops are those of the serving path, in its order. Prefill is held against the measured peak of
// the core's BF16 multiplication at the same instruction level, decode against the measured
// bandwidth of reading as many bytes as the weights have. Times are CPU time of the thread, the
// median of several runs.
//   trunk_bench [--check] [--model 960] [--level avx512_bf16]
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "backend/cpu/cpu_backend.h"
#include "kernels/common/bf16.h"
#include "kernels/common/philox.h"
#include "nlohmann/json.hpp"
#include "tensor/arena.h"
#include "tests/bench/machine.h"
#include "tests/bench/timing.h"

namespace saccade::bench {
namespace {

constexpr int64_t kPrompt = 316;
constexpr int kDecodeSteps = 16;
constexpr double kBar = 0.80;  // of the peak in prefill, of the bandwidth in decode

struct Shape {
  const char* name;
  int64_t layers, width, q_heads, kv_heads, head_dim, ffn, vocab;
};
constexpr Shape kShapes[] = {{"960", 16, 960, 15, 5, 64, 2560, 49280},
                             {"2048", 22, 2048, 32, 4, 64, 5632, 32000}};

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return std::move(*value);
  std::cerr << value.status() << "\n";
  std::exit(2);
}
void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(2);
}

// Numbers that all weights are cut from, each at another place.
class Noise {
 public:
  explicit Noise(int64_t count) : values_(static_cast<size_t>(count)) {
    for (size_t i = 0; i < values_.size(); i += 4) {
      const Philox4x32 block = PhiloxBlock(1, i, 0);
      for (size_t j = 0; j < 4 && i + j < values_.size(); ++j) {
        values_[i + j] =
            F32ToBf16((static_cast<float>(block.word[j] >> 8) * 0x1p-23f - 1.0f) * 0.05f);
      }
    }
  }
  TensorView Cut(int64_t n, int64_t k) {
    const auto room = static_cast<int64_t>(values_.size()) - n * k;
    at_ = (at_ + 7919) % (room + 1);
    return TensorView::Dense(values_.data() + at_, DType::kBf16, MemKind::kHost, {n, k});
  }

 private:
  std::vector<uint16_t> values_;
  int64_t at_ = 0;
};

class Trunk {
 public:
  Trunk(const Shape& shape, Isa isa) : shape_(shape) {
    CpuOptions options;
    options.threads = 1;
    options.isa = isa;
    backend_ = Must(MakeCpuBackend(options));
    stream_ = Must(backend_->NewStream());
    const int64_t q_width = shape.q_heads * shape.head_dim;
    const int64_t qkv_width = q_width + 2 * shape.kv_heads * shape.head_dim;
    Noise noise(std::max(shape.vocab, 2 * shape.ffn) * shape.width + 100000);
    for (int64_t i = 0; i < shape.layers; ++i) {
      Layer layer;
      layer.qkv = Linear(noise.Cut(qkv_width, shape.width));
      layer.out = Linear(noise.Cut(shape.width, q_width));
      layer.gated = Keep(Must(backend_->PackGated(
          noise.Cut(shape.ffn, shape.width), noise.Cut(shape.ffn, shape.width), DType::kBf16)));
      layer.down = Linear(noise.Cut(shape.width, shape.ffn));
      layers_.push_back(layer);
    }
    head_ = Linear(noise.Cut(shape.vocab, shape.width));
    ones_ = Must(
        backend_->Allocate(static_cast<size_t>(shape.width) * sizeof(float), MemKind::kDevice));
    const std::vector<float> ones(static_cast<size_t>(shape.width), 1.0f);
    Put(*ones_, ones);
    const std::vector<float> embedded(static_cast<size_t>(kPrompt * shape.width), 0.5f);
    embedded_ = Must(backend_->Allocate(embedded.size() * sizeof(float), MemKind::kDevice));
    Put(*embedded_, embedded);
    KvGeometry geometry;
    geometry.layers = static_cast<uint32_t>(shape.layers);
    geometry.kv_heads = static_cast<uint32_t>(shape.kv_heads);
    geometry.head_dim = static_cast<uint32_t>(shape.head_dim);
    geometry.dtype = DType::kBf16;
    kv_ = Must(backend_->NewKvStorage(geometry, kPages));
    scratch_ = Must(backend_->Allocate(size_t{64} << 20, MemKind::kDevice));
    integers_ = Must(backend_->Allocate(sizeof(int32_t) * 4096, MemKind::kDevice));
  }

  // Runs `rows` tokens from position `first`; the last one's logits are made.
  void Forward(int64_t first, int64_t rows) {
    Arena arena(*scratch_);
    const PagedBatch batch = Batch(first, rows);
    const int64_t q_width = shape_.q_heads * shape_.head_dim;
    const TensorView x = Must(arena.New(DType::kF32, {rows, shape_.width}));
    const TensorView h = Must(arena.New(DType::kBf16, {rows, shape_.width}));
    const TensorView q = Must(arena.New(DType::kBf16, {rows, q_width}));
    const TensorView attended = Must(arena.New(DType::kBf16, {rows, q_width}));
    const TensorView inner = Must(arena.New(DType::kBf16, {rows, shape_.ffn}));
    const TensorView last = Must(arena.New(DType::kF32, {1, shape_.width}));
    const TensorView normed = Must(arena.New(DType::kBf16, {1, shape_.width}));
    const TensorView logits = Must(arena.New(DType::kF32, {1, shape_.vocab}));
    const TensorView gamma = ones_->View(DType::kF32, {shape_.width});
    const Ops& ops = backend_->ops();
    Must(stream_->Copy(x, embedded_->View(DType::kF32, {rows, shape_.width})));
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      Must(ops.RmsNorm(*stream_, x, gamma, h, 1e-5f));
      QkvRopeAppendArgs qkv;
      qkv.weight = layer.qkv;
      qkv.x = h;
      qkv.q = q;
      qkv.kv = kv_.get();
      qkv.layer = static_cast<uint32_t>(i);
      qkv.q_heads = static_cast<uint32_t>(shape_.q_heads);
      qkv.batch = batch;
      Must(ops.QkvRopeAppend(*stream_, qkv));
      PagedAttentionArgs attention;
      attention.q = q;
      attention.out = attended;
      attention.kv = kv_.get();
      attention.layer = static_cast<uint32_t>(i);
      attention.q_heads = static_cast<uint32_t>(shape_.q_heads);
      attention.scale = 0.125f;
      attention.batch = batch;
      Must(ops.PagedAttention(*stream_, attention));
      LinearArgs out;
      out.weight = layer.out;
      out.x = attended;
      out.y = x;
      out.residual = x;
      Must(ops.Linear(*stream_, out));
      Must(ops.RmsNorm(*stream_, x, gamma, h, 1e-5f));
      GatedLinearArgs gated;
      gated.weight = layer.gated;
      gated.x = h;
      gated.y = inner;
      Must(ops.GatedLinear(*stream_, gated));
      LinearArgs down;
      down.weight = layer.down;
      down.x = inner;
      down.y = x;
      down.residual = x;
      Must(ops.Linear(*stream_, down));
    }
    Must(ops.GatherRows(*stream_, x, last_row_, last));
    Must(ops.RmsNorm(*stream_, last, gamma, normed, 1e-5f));
    LinearArgs head;
    head.weight = head_;
    head.x = normed;
    head.y = logits;
    Must(ops.Linear(*stream_, head));
    Must(stream_->Synchronize());
  }

  std::unique_ptr<Buffer> NewBuffer(size_t bytes) {
    return Must(backend_->Allocate(bytes, MemKind::kPinned));
  }
  size_t weight_bytes() const {
    size_t bytes = 0;
    for (const auto& weight : weights_) bytes += weight->bytes();
    return bytes;
  }
  double prefill_flop() const {
    const double weights =
        static_cast<double>(shape_.layers * shape_.width *
                            (2 * shape_.q_heads * shape_.head_dim +
                             2 * shape_.kv_heads * shape_.head_dim + 3 * shape_.ffn));
    const double attention =
        static_cast<double>(shape_.layers * 4 * shape_.q_heads * shape_.head_dim) * kPrompt *
        (kPrompt + 1) / 2;
    return 2 * weights * kPrompt + attention +
           2.0 * static_cast<double>(shape_.width * shape_.vocab);
  }

 private:
  struct Layer {
    const PackedWeight* qkv = nullptr;
    const PackedWeight* out = nullptr;
    const PackedWeight* gated = nullptr;
    const PackedWeight* down = nullptr;
  };
  static constexpr uint32_t kPages = (kPrompt + kDecodeSteps) / 16 + 2;

  const PackedWeight* Keep(std::unique_ptr<PackedWeight> weight) {
    weights_.push_back(std::move(weight));
    return weights_.back().get();
  }
  const PackedWeight* Linear(const TensorView& weight) {
    return Keep(Must(backend_->PackLinear({&weight, 1}, DType::kBf16)));
  }
  template <class T>
  void Put(Buffer& to, const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    const auto staging = Must(backend_->Allocate(static_cast<size_t>(bytes), MemKind::kPinned));
    std::copy_n(reinterpret_cast<const std::byte*>(values.data()), bytes, staging->data());
    Must(stream_->Copy(to.View(DType::kU8, {bytes}), staging->View(DType::kU8, {bytes})));
    Must(stream_->Synchronize());
  }
  // One sequence in pages 0, 1, ... that holds first + rows tokens.
  PagedBatch Batch(int64_t first, int64_t rows) {
    std::vector<int32_t> all;
    PagedBatch batch;
    const auto add = [&](auto count, auto value) {
      const auto offset = all.size() * sizeof(int32_t);
      for (int64_t i = 0; i < count; ++i) all.push_back(static_cast<int32_t>(value(i)));
      return integers_->View(DType::kI32, {count}, offset);
    };
    const int64_t tokens = first + rows;
    const int64_t pages = (tokens + 15) / 16;
    batch.num_seqs = 1;
    batch.num_rows = static_cast<int32_t>(rows);
    batch.num_pages = batch.max_pages = static_cast<int32_t>(pages);
    batch.row_begin = add(int64_t{2}, [&](int64_t i) { return i * rows; });
    batch.page_begin = add(int64_t{2}, [&](int64_t i) { return i * pages; });
    batch.pages = add(pages, [](int64_t i) { return i; });
    batch.page_len = add(pages, [&](int64_t i) { return std::min<int64_t>(16, tokens - 16 * i); });
    batch.page_pos = add(pages, [](int64_t i) { return 16 * i; });
    batch.row_pos = add(rows, [&](int64_t i) { return first + i; });
    batch.row_limit = batch.row_pos;
    batch.row_slot = add(rows, [&](int64_t i) { return first + i; });
    last_row_ = add(int64_t{1}, [&](int64_t) { return rows - 1; });
    Put(*integers_, all);
    return batch;
  }

  Shape shape_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<PackedWeight>> weights_;
  std::vector<Layer> layers_;
  const PackedWeight* head_ = nullptr;
  std::unique_ptr<Buffer> ones_, embedded_, scratch_, integers_;
  std::unique_ptr<KvStorage> kv_;
  TensorView last_row_;
};

struct Result {
  double prefill_ms = 0, prefill_gflops = 0, prefill_share = 0;
  double decode_ms = 0, decode_gbps = 0, decode_share = 0;
};

Result Measure(const Shape& shape, Isa isa, const Peaks& peaks) {
  Trunk trunk(shape, isa);
  Result r;
  trunk.Forward(0, kPrompt);
  std::vector<double> prefill;
  for (int i = 0; i < 5 && (i < 3 || prefill[0] < 1.0); ++i) {
    prefill.push_back(CpuSeconds([&] { trunk.Forward(0, kPrompt); }));
  }
  // Steps and reads of as many bytes alternate, so that both meet the same machine.
  const size_t bytes = trunk.weight_bytes();
  const auto buffer = trunk.NewBuffer(bytes);
  std::fill_n(buffer->data(), bytes, std::byte{1});
  std::vector<double> decode;
  std::vector<double> plain;
  std::vector<double> prefetched;
  for (int i = 0; i < kDecodeSteps; ++i) {
    decode.push_back(CpuSeconds([&] { trunk.Forward(kPrompt + i, 1); }));
    plain.push_back(CpuSeconds([&] { ReadPlain(buffer->data(), bytes); }));
    prefetched.push_back(CpuSeconds([&] { ReadPrefetched(buffer->data(), bytes); }));
  }
  const double bandwidth = static_cast<double>(bytes) /
                           std::min(Summary(plain).median, Summary(prefetched).median) / 1e9;
  r.prefill_ms = 1e3 * Summary(prefill).median;
  r.prefill_gflops = trunk.prefill_flop() / r.prefill_ms / 1e6;
  r.prefill_share = r.prefill_gflops / peaks.bf16;
  r.decode_ms = 1e3 * Summary(decode).median;
  r.decode_gbps = static_cast<double>(bytes) / r.decode_ms / 1e6;
  r.decode_share = r.decode_gbps / bandwidth;
  std::printf(
      "%-12s trunk %-5s prefill %8.1f ms %8.1f GFLOP/s = %5.1f %% of %.0f (%s); decode %6.2f ms "
      "%5.1f GB/s = %5.1f %% of "
      "%.1f\n",
      cpu::IsaName(isa), shape.name, r.prefill_ms, r.prefill_gflops, 100 * r.prefill_share,
      peaks.bf16, peaks.bf16_instruction, r.decode_ms, r.decode_gbps, 100 * r.decode_share,
      bandwidth);
  std::fflush(stdout);
  return r;
}

int Run(bool check, const std::string& only_model, const std::string& only_level) {
  // The bar is set where vdpbf16ps is the widest instruction; a machine without it is held to what
  // it has. AMX is reported beside it: there prefill is bound by memory, not by the tiles.
  Isa judged = Isa::kAvx512Bf16;
  if (!cpu::IsaSupported(judged))
    judged = cpu::IsaSupported(Isa::kAvx512) ? Isa::kAvx512 : Isa::kAvx2;
  std::vector<Isa> levels = {judged};
  if (cpu::IsaSupported(Isa::kAmxBf16)) levels.push_back(Isa::kAmxBf16);
  nlohmann::json summary = {{"name", "trunk"}, {"judged_level", cpu::IsaName(judged)}};
  bool holds = true;
  for (const Isa isa : levels) {
    if (!only_level.empty() && only_level != cpu::IsaName(isa)) continue;
    const Peaks peaks = MeasurePeaks(isa);
    for (const Shape& shape : kShapes) {
      if (!only_model.empty() && only_model != shape.name) continue;
      const Result r = Measure(shape, isa, peaks);
      if (isa == judged) holds = holds && r.prefill_share >= kBar && r.decode_share >= kBar;
      summary[cpu::IsaName(isa)][shape.name] = {{"prefill_ms", r.prefill_ms},
                                                {"prefill_gflops", r.prefill_gflops},
                                                {"prefill_share_of_peak", r.prefill_share},
                                                {"peak", peaks.bf16_instruction},
                                                {"decode_ms", r.decode_ms},
                                                {"decode_gbps", r.decode_gbps},
                                                {"decode_share_of_bandwidth", r.decode_share}};
    }
  }
  std::printf(
      "bar at %s: %.0f %% of the %s peak in prefill, %.0f %% of the read bandwidth in decode: %s\n",
      cpu::IsaName(judged), 100 * kBar, MeasurePeaks(judged).bf16_instruction, 100 * kBar,
      holds ? "holds" : "MISSED");
  summary["pass"] = holds;
  std::cout << summary.dump() << std::endl;
  return check && !holds ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) {
  CLI::App app("Llama trunks with random weights, one thread");
  bool check = false;
  std::string model;
  std::string level;
  app.add_flag("--check", check, "exit 1 unless the bars hold");
  app.add_option("--model", model, "960 or 2048 only");
  app.add_option("--level", level, "one instruction level only");
  CLI11_PARSE(app, argc, argv);
  return saccade::bench::Run(check, model, level);
}
