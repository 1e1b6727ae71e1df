#pragma once
// Every metric the server exports, as one struct of cached handles. Label values come from enums
// and from names of classes, backends and models, of which there are few: whoever names a new model
// bounds them. A model's series stay when it is unloaded, so that its counters go on with the next
// load.
// Recording is an atomic add (histograms: an uncontended lock), with no label lookup. Names, labels
// and units are listed in README.md beside this file.
//
// Thread rules: any thread may use any handle; methods say who may call them.
#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/memory_budget.h"
#include "base/modality.h"
#include "base/policy.h"
#include "base/status.h"

namespace saccade {

// What a model step worked on.
enum class StepKind : uint8_t { kEncode, kPrefill, kDecode, kMixed };
inline constexpr size_t kStepKinds = 4;

template <class Handle>
using PerReason = std::array<Handle*, kReasonCount>;

// One latency class. Every request offered ends in exactly one of: rejected, met, missed, failed.
struct ClassMetrics {
  prometheus::Counter* admitted = nullptr;
  PerReason<prometheus::Counter> rejected{};  // at admission
  prometheus::Counter* met = nullptr;         // answered before its deadline, or without one
  prometheus::Counter* missed = nullptr;      // admitted, but answered late or expired
  prometheus::Counter* degraded = nullptr;    // of met: with less than was asked for
  PerReason<prometheus::Counter> failed{};  // admitted, ended without an answer for another reason
  prometheus::Gauge* queued = nullptr;      // admitted, no step yet
  prometheus::Gauge* running = nullptr;     // in a step, or between two of them
  prometheus::Histogram* queue_seconds = nullptr;       // arrival to the start of its first step
  prometheus::Histogram* end_to_end_seconds = nullptr;  // arrival to its last answer

  void Reject(Reason reason) const { rejected[static_cast<size_t>(reason)]->Increment(); }
  void Fail(Reason reason) const { failed[static_cast<size_t>(reason)]->Increment(); }
};

// One K/V partition of one model. Engine thread only (it owns all K/V metadata).
struct PartitionMetrics {
  prometheus::Gauge* free_blocks = nullptr;  // that this partition could take now
  prometheus::Gauge* held_blocks = nullptr;  // named by a sequence
  prometheus::Gauge* idle_blocks = nullptr;  // cached, named by none
  prometheus::Counter* hit_tokens = nullptr;
  prometheus::Counter* miss_tokens = nullptr;
  prometheus::Gauge* hit_rate = nullptr;
  std::array<prometheus::Counter*, kEvictionReasons> evictions{};  // blocks
  double hit_rate_ema = 0;

  // Counts one lookup and moves the average: ema = 0.9 ema + 0.1 hit / (hit + miss), from 0. No
  // tokens: no effect.
  void RecordLookup(uint64_t hit, uint64_t miss);
  void SetBlocks(uint64_t free, uint64_t held, uint64_t idle) const {
    free_blocks->Set(static_cast<double>(free));
    held_blocks->Set(static_cast<double>(held));
    idle_blocks->Set(static_cast<double>(idle));
  }
  void Evict(EvictionReason reason, uint64_t blocks = 1) const {
    evictions[static_cast<size_t>(reason)]->Increment(static_cast<double>(blocks));
  }
};

struct StepMetrics {
  prometheus::Histogram* predicted_seconds = nullptr;
  prometheus::Histogram* taken_seconds = nullptr;
};

struct ModelMetrics {
  std::array<PartitionMetrics, kModalities> partitions;  // by Modality
  std::array<StepMetrics, kStepKinds> steps;             // by StepKind
  prometheus::Histogram* batch_sequences = nullptr;      // sequences of one step
  prometheus::Histogram* batch_rows = nullptr;           // token rows of one step
  prometheus::Gauge* loads = nullptr;                    // that take requests now
  prometheus::Gauge* sessions = nullptr;                 // open now
  prometheus::Counter* frames_received = nullptr;
  prometheus::Counter* frames_superseded =
      nullptr;  // replaced by a newer frame before any request used them
  prometheus::Counter* frames_stale =
      nullptr;  // refused because a newer capture time was already there
  PerReason<prometheus::Counter> frames_rejected{};
  prometheus::Histogram* frame_age_seconds =
      nullptr;  // capture of the oldest frame used, to the answer
  prometheus::Counter* vision_cache_hits = nullptr;  // frames
  prometheus::Counter* vision_cache_misses = nullptr;
  prometheus::Counter* invalid_action_tokens = nullptr;
  prometheus::Counter* non_finite = nullptr;        // requests failed for NaN or Inf
  prometheus::Counter* generated_tokens = nullptr;  // of texts that were answered

  PartitionMetrics& partition(Modality m) { return partitions[static_cast<size_t>(m)]; }
  void RejectFrame(Reason reason) const {
    frames_rejected[static_cast<size_t>(reason)]->Increment();
  }
  void RecordStep(StepKind kind, std::chrono::microseconds predicted,
                  std::chrono::microseconds taken, uint64_t sequences, uint64_t rows) const;
};

struct BackendMetrics {
  prometheus::Gauge* worker_up = nullptr;  // 1 while its worker accepts steps
};

struct MetricsOptions {
  std::string version;
  std::vector<std::string> classes;       // configured names, by ClassId
  std::vector<double> class_deadlines_s;  // of the same; 0 or absent: none
  std::vector<std::string> models;        // whose series are there from the start
  std::vector<std::string> backends;      // by WorkerId
  const MemoryBudget* memory = nullptr;   // may be null; outlives the Metrics
};

class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  ClassMetrics& klass(ClassId id) { return classes_[static_cast<size_t>(id.value())]; }
  // Made on first use, then for ever at this address. Any thread.
  ModelMetrics& model(const std::string& name);
  BackendMetrics& backend(WorkerId id) { return backends_[static_cast<size_t>(id.value())]; }

  prometheus::Gauge* streams = nullptr;  // open Session streams, opened or not
  prometheus::Gauge* ready = nullptr;    // 1 while health answers SERVING
  // Requests refused before they had a model or a class: at open, at parsing, by server-wide
  // limits.
  PerReason<prometheus::Counter> refused{};
  void Refuse(Reason reason) const { refused[static_cast<size_t>(reason)]->Increment(); }

  // Publishes what a backend runs on, once it is made: kind and its one-line description.
  void SetBackendInfo(WorkerId id, std::string_view kind, std::string_view description);

  // The Prometheus text exposition of everything.
  std::string Serialize() const;
  // Everything; outlives no Metrics.
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables() const {
    return {registry_, live_};
  }

 private:
  struct ModelFamilies;
  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<prometheus::Collectable> live_;  // read when asked: process and memory
  std::vector<std::string> backend_names_;
  std::vector<ClassMetrics> classes_;
  std::mutex models_mu_;
  std::unique_ptr<ModelFamilies> families_;
  std::map<std::string, ModelMetrics> models_;  // by name; a map keeps addresses
  std::vector<BackendMetrics> backends_;
  prometheus::Family<prometheus::Gauge>* backend_info_ = nullptr;
};

inline double ToSeconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

// Serves GET /metrics on its own threads until destroyed, which takes up to 2 s (the poll interval
// of the HTTP server underneath).
class MetricsExposer {
 public:
  // `address` is host:port, port 0 takes a free one. UNAVAILABLE naming the address when it cannot
  // be bound.
  static absl::StatusOr<std::unique_ptr<MetricsExposer>> Start(const std::string& address,
                                                               const Metrics& metrics);
  ~MetricsExposer();
  int port() const { return port_; }

 private:
  class Server;
  MetricsExposer(std::unique_ptr<Server> server, int port);
  std::unique_ptr<Server> server_;
  int port_;
};

}  // namespace saccade
