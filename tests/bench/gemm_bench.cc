// Our GEMM beside oneDNN's, one thread, CPU time, in one run: calls alternate, and both rotate
// through weights too many to stay in cache, as a model does. One process per instruction level,
// because oneDNN fixes its level at first use.
//   gemm_bench [--check] [--level avx512_bf16] [--seconds 0.4]
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "CLI/CLI.hpp"
#include "backend/cpu/cpu_backend.h"
#include "kernels/common/bf16.h"
#include "nlohmann/json.hpp"
#include "tests/bench/machine.h"
#include "tests/bench/timing.h"
#if defined(SACCADE_HAVE_ONEDNN)
#include "dnnl.hpp"
#endif

namespace saccade::bench {
namespace {

struct Shape {
  const char* name;
  int64_t n;
  int64_t k;
};
// The products of a layer of Llama 16 x 960 and 22 x 2048, and a large square.
constexpr Shape kShapes[] = {
    {"960 qkv", 1600, 960},        {"960 o", 960, 960},       {"960 gate+up", 5120, 960},
    {"960 down", 960, 2560},       {"2048 qkv", 2560, 2048},  {"2048 o", 2048, 2048},
    {"2048 gate+up", 11264, 2048}, {"2048 down", 2048, 5632}, {"4096", 4096, 4096}};
constexpr int64_t kRows[] = {1, 8, 316};
constexpr size_t kRotated = size_t{192} << 20;  // bytes of weights a series of calls walks through
constexpr double kBarFew = 1.00;                // of oneDNN's rate at M = 8
constexpr double kBarMany = 0.95;               // and at M = 316

struct Result {
  std::string level, dtype, shape;
  int64_t m = 0;
  double ours_gflops = 0, peer_gflops = 0, ours_gbps = 0, peer_gbps = 0;
  double ratio = 0;  // of the medians; 0 without a peer
};

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

// The same product in our backend.
class Ours {
 public:
  Ours(Backend& backend, Stream& stream, int64_t m, int64_t n, int64_t k, DType dtype,
       size_t copies)
      : backend_(backend), stream_(stream) {
    std::vector<float> weight(static_cast<size_t>(n * k), 0.01f);
    const TensorView view = TensorView::Dense(weight.data(), DType::kF32, MemKind::kHost, {n, k});
    for (size_t i = 0; i < copies; ++i)
      weights_.push_back(Must(backend.PackLinear({&view, 1}, dtype)));
    x_ = Must(backend.Allocate(static_cast<size_t>(m * k) * DTypeSize(dtype), MemKind::kDevice));
    y_ = Must(backend.Allocate(static_cast<size_t>(m * n) * sizeof(float), MemKind::kDevice));
    args_.x = x_->View(dtype, {m, k});
    args_.y = y_->View(DType::kF32, {m, n});
  }
  void Call(size_t i) {
    args_.weight = weights_[i % weights_.size()].get();
    Must(backend_.ops().Linear(stream_, args_));
  }

 private:
  Backend& backend_;
  Stream& stream_;
  std::vector<std::unique_ptr<PackedWeight>> weights_;
  std::unique_ptr<Buffer> x_;
  std::unique_ptr<Buffer> y_;
  LinearArgs args_;
};

#if defined(SACCADE_HAVE_ONEDNN)
// oneDNN's matmul with weights in the layout that it asks for.
class Peer {
 public:
  Peer(Backend& backend, int64_t m, int64_t n, int64_t k, DType dtype, size_t copies)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using Tag = dnnl::memory::format_tag;
    const auto type =
        dtype == DType::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
    const dnnl::memory::desc x({m, k}, type, Tag::ab);
    const dnnl::memory::desc w({k, n}, type, Tag::any);
    const dnnl::memory::desc y({m, n}, dnnl::memory::data_type::f32, Tag::ab);
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc primitive(engine_, x, w, y);
#else
    const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(x, w, y), engine_);
#endif
    matmul_ = dnnl::matmul(primitive);
    x_ = dnnl::memory(x, engine_);
    y_ = dnnl::memory(y, engine_);
    std::memset(x_.get_data_handle(), 0, x.get_size());
    for (size_t i = 0; i < copies; ++i) {
      // The same kind of memory (huge pages) as ours.
      const size_t size = primitive.weights_desc().get_size();
      buffers_.push_back(Must(backend.Allocate(size, MemKind::kPinned)));
      std::memset(buffers_.back()->data(), 0, size);
      weights_.emplace_back(primitive.weights_desc(), engine_, buffers_.back()->data());
    }
  }
  void Call(size_t i) {
    matmul_.execute(stream_, {{DNNL_ARG_SRC, x_},
                              {DNNL_ARG_WEIGHTS, weights_[i % weights_.size()]},
                              {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  dnnl::memory x_, y_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<dnnl::memory> weights_;
};

void CapPeer(Isa isa) {
  dnnl::set_max_cpu_isa(isa == Isa::kAvx2         ? dnnl::cpu_isa::avx2
                        : isa == Isa::kAvx512     ? dnnl::cpu_isa::avx512_core
                        : isa == Isa::kAvx512Bf16 ? dnnl::cpu_isa::avx512_core_bf16
                                                  : dnnl::cpu_isa::all);
}
#endif

Result Measure(Backend& backend, Stream& stream, Isa isa, const Shape& shape, int64_t m,
               DType dtype, double seconds) {
  const size_t bytes = static_cast<size_t>(shape.n * shape.k) * DTypeSize(dtype);
  const size_t copies = std::max<size_t>(3, kRotated / bytes + 1);
  Ours ours(backend, stream, m, shape.n, shape.k, dtype, copies);
  std::vector<double> our_times;
  std::vector<double> peer_times;
#if defined(SACCADE_HAVE_ONEDNN)
  Peer peer(backend, m, shape.n, shape.k, dtype, copies);
#endif
  double spent = 0;
  for (size_t i = 0; i < copies + 5 || spent < seconds; ++i) {
    const double a = CpuSeconds([&] { ours.Call(i); });
    double b = 0;
#if defined(SACCADE_HAVE_ONEDNN)
    b = CpuSeconds([&] { peer.Call(i); });
#endif
    if (i < 2) continue;  // page faults and code generation
    our_times.push_back(a);
    peer_times.push_back(b);
    spent += a + b;
    if (our_times.size() >= 7 && spent > seconds) break;
  }
  const double flop = 2.0 * static_cast<double>(m * shape.n * shape.k);
  Result r;
  r.level = cpu::IsaName(isa);
  r.dtype = std::string(DTypeName(dtype));
  r.shape = shape.name;
  r.m = m;
  const Summary mine(our_times);
  r.ours_gflops = flop / mine.median / 1e9;
  r.ours_gbps = static_cast<double>(bytes) / mine.median / 1e9;
#if defined(SACCADE_HAVE_ONEDNN)
  const Summary theirs(peer_times);
  r.peer_gflops = flop / theirs.median / 1e9;
  r.peer_gbps = static_cast<double>(bytes) / theirs.median / 1e9;
  r.ratio = theirs.median / mine.median;
#endif
  return r;
}

// One level, in this process: prints one tab-separated row per product.
int RunLevel(const std::string& level, double seconds) {
  Isa isa = Isa::kAuto;
  for (const Isa known : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmxBf16}) {
    if (level == cpu::IsaName(known)) isa = known;
  }
  CpuOptions options;
  options.threads = 1;
  options.isa = isa;
  const auto backend = Must(MakeCpuBackend(options));
  const auto stream = Must(backend->NewStream());
#if defined(SACCADE_HAVE_ONEDNN)
  CapPeer(isa);
#endif
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const int64_t m : kRows) {
      for (const Shape& shape : kShapes) {
        if (dtype == DType::kF32 && std::strstr(shape.name, "960") == nullptr)
          continue;  // for orientation only
        const Result r = Measure(*backend, *stream, isa, shape, m, dtype, seconds);
        std::printf("%s\t%s\t%s\t%ld\t%g\t%g\t%g\t%g\t%g\n", r.level.c_str(), r.dtype.c_str(),
                    r.shape.c_str(), static_cast<long>(r.m), r.ours_gflops, r.peer_gflops,
                    r.ours_gbps, r.peer_gbps, r.ratio);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

std::vector<Result> RunChild(const std::string& program, const std::string& level, double seconds) {
  std::vector<Result> results;
  const std::string command = "OMP_NUM_THREADS=1 '" + program + "' --level " + level +
                              " --seconds " + std::to_string(seconds);
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return results;
  char line[512];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) {
    std::istringstream fields(line);
    Result r;
    std::string m;
    std::getline(fields, r.level, '\t');
    std::getline(fields, r.dtype, '\t');
    std::getline(fields, r.shape, '\t');
    fields >> r.m >> r.ours_gflops >> r.peer_gflops >> r.ours_gbps >> r.peer_gbps >> r.ratio;
    if (fields.fail()) continue;
    results.push_back(r);
    std::printf("%-12s %-5s M=%-4ld %-13s %9.1f %9.1f GFLOP/s %7.1f %7.1f GB/s  %6.1f %%\n",
                r.level.c_str(), r.dtype.c_str(), static_cast<long>(r.m), r.shape.c_str(),
                r.ours_gflops, r.peer_gflops, r.ours_gbps, r.peer_gbps, 100 * r.ratio);
    std::fflush(stdout);
  }
  if (pclose(pipe) != 0) results.clear();
  return results;
}

// Geometric mean of the ratios of one row count.
double Mean(const std::vector<Result>& results, const std::string& dtype, int64_t m) {
  double sum = 0;
  int count = 0;
  for (const Result& r : results) {
    if (r.dtype != dtype || r.m != m || r.ratio <= 0) continue;
    sum += std::log(r.ratio);
    ++count;
  }
  return count == 0 ? 0 : std::exp(sum / count);
}

int RunAll(const std::string& program, bool check, double seconds) {
  nlohmann::json summary = {{"name", "gemm"},
                            {"unit", "share of oneDNN's rate, geometric mean over shapes"}};
  bool holds = true;
  std::printf("%-12s %-5s %-6s %-13s %9s %9s %-16s %7s\n", "level", "type", "rows", "product",
              "ours", "oneDNN", "(then GB/s of weights)", "share");
  int levels = 0;
  for (const Isa isa : {Isa::kAvx512Bf16, Isa::kAmxBf16}) {
    if (!cpu::IsaSupported(isa)) continue;
    ++levels;
    const std::string level = cpu::IsaName(isa);
    const Peaks peaks = MeasurePeaks(isa);
    std::printf("-- %s: peak of one core %.0f GFLOP/s (%s), F32 %.0f\n", level.c_str(), peaks.bf16,
                peaks.bf16_instruction, peaks.f32);
    const std::vector<Result> results = RunChild(program, level, seconds);
    const double many = Mean(results, "bf16", 316);
    const double few = Mean(results, "bf16", 8);
    const bool level_holds = many >= kBarMany && few >= kBarFew;
    holds = holds && level_holds;
    std::printf(
        "-- %s bf16: %.1f %% of oneDNN at M=316 (bar %.0f), %.1f %% at M=8 (bar %.0f), %.1f %% at "
        "M=1: %s\n",
        level.c_str(), 100 * many, 100 * kBarMany, 100 * few, 100 * kBarFew,
        100 * Mean(results, "bf16", 1), level_holds ? "holds" : "MISSED");
    summary[level] = {{"bf16_m316", many},
                      {"bf16_m8", few},
                      {"bf16_m1", Mean(results, "bf16", 1)},
                      {"f32_m316", Mean(results, "f32", 316)},
                      {"f32_m8", Mean(results, "f32", 8)},
                      {"f32_m1", Mean(results, "f32", 1)},
                      {"peak_gflops", peaks.bf16}};
  }
  if (levels == 0) {
    std::printf("this machine has no BF16 instructions: nothing to compare\n");
    holds = false;
  }
#if !defined(SACCADE_HAVE_ONEDNN)
  std::printf("built without oneDNN: there is no peer\n");
  holds = false;
#endif
  summary["pass"] = holds;
  std::cout << summary.dump() << std::endl;
  return check && !holds ? 1 : 0;
}

}  // namespace
}  // namespace saccade::bench

int main(int argc, char** argv) {
  CLI::App app("GEMM beside oneDNN, one thread");
  bool check = false;
  double seconds = 0.4;
  std::string level;
  app.add_flag("--check", check, "exit 1 unless the bars hold");
  app.add_option("--seconds", seconds, "of calls per product");
  app.add_option("--level", level, "measure one instruction level in this process, rows only");
  CLI11_PARSE(app, argc, argv);
  if (!level.empty()) return saccade::bench::RunLevel(level, seconds);
  return saccade::bench::RunAll(argv[0], check, seconds);
}
