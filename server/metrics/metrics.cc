#include "metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <map>
#include <utility>

#include "base/process.h"
#include "base/strings.h"

namespace saccade {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using Labels = std::map<std::string, std::string>;

// Deadlines are 20, 50 and 100 ms: bounds lie on them and around them.
const Histogram::BucketBoundaries kLatencySeconds = {0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075,
                                                     0.010,  0.015, 0.020, 0.030, 0.040, 0.050,
                                                     0.075,  0.100, 0.150, 0.200, 0.300, 0.500};
const Histogram::BucketBoundaries kStepSeconds = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003,
                                                  0.005,  0.0075, 0.010,  0.015, 0.020, 0.030,
                                                  0.050,  0.100,  0.200,  0.500};
const Histogram::BucketBoundaries kAgeSeconds = {
    0.002, 0.005, 0.010, 0.020, 0.030, 0.050, 0.075, 0.100, 0.150, 0.200, 0.300, 0.500, 1, 2, 5};
const Histogram::BucketBoundaries kSequences = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
const Histogram::BucketBoundaries kRows = {1,   2,   4,   8,   16,   32,   64,  128,
                                           256, 384, 512, 768, 1024, 2048, 4096};

constexpr std::array<std::string_view, kStepKinds> kStepKindNames = {"encode", "prefill", "decode",
                                                                     "mixed"};

std::string Compiler() {
#if defined(__clang__)
  return StrCat("clang ", __clang_major__, ".", __clang_minor__);
#else
  return StrCat("gcc ", __GNUC__, ".", __GNUC_MINOR__);
#endif
}

// Makes families of one registry; a family is made once and shared by every set of labels.
class Maker {
 public:
  explicit Maker(prometheus::Registry& registry) : registry_(registry) {}

  Family<Counter>& Counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry_);
  }
  Family<Gauge>& Gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry_);
  }
  Family<Histogram>& Histograms(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_);
  }

 private:
  prometheus::Registry& registry_;
};

PerReason<Counter> ByReason(Family<Counter>& family, Labels labels) {
  PerReason<Counter> counters{};
  for (size_t r = 0; r < counters.size(); ++r) {
    labels["reason"] = std::string(ReasonName(static_cast<Reason>(r)));
    counters[r] = &family.Add(labels);
  }
  return counters;
}

std::vector<ClassMetrics> MakeClasses(Maker& make, const MetricsOptions& options) {
  auto& admitted =
      make.Counters("saccade_requests_admitted_total", "Act requests admitted, by latency class.");
  auto& rejected = make.Counters("saccade_requests_rejected_total",
                                 "Act requests refused at admission, by latency class and reason.");
  auto& met = make.Counters("saccade_requests_met_total",
                            "Act requests answered by their deadline, or having none.");
  auto& missed = make.Counters("saccade_requests_missed_total",
                               "Admitted act requests answered late or expired.");
  auto& degraded = make.Counters("saccade_requests_degraded_total",
                                 "Act requests answered with less than was asked for, in time.");
  auto& failed =
      make.Counters("saccade_requests_failed_total",
                    "Admitted act requests that ended without an answer for another reason.");
  auto& queue = make.Histograms("saccade_queue_seconds",
                                "From the arrival of an act request to its first model step.");
  auto& end_to_end = make.Histograms("saccade_end_to_end_seconds",
                                     "From the arrival of an act request to its last answer.");
  auto& queued =
      make.Gauges("saccade_requests_queued", "Admitted act requests without a step yet.");
  auto& running =
      make.Gauges("saccade_requests_running", "Admitted act requests that have had a step.");
  auto& deadline = make.Gauges("saccade_class_deadline_seconds",
                               "Deadline of a request that brings none of its own; 0: none.");
  std::vector<ClassMetrics> classes;
  for (size_t i = 0; i < options.classes.size(); ++i) {
    const Labels labels = {{"class", options.classes[i]}};
    deadline.Add(labels).Set(i < options.class_deadlines_s.size() ? options.class_deadlines_s[i]
                                                                  : 0);
    ClassMetrics& c = classes.emplace_back();
    c.queued = &queued.Add(labels);
    c.running = &running.Add(labels);
    c.admitted = &admitted.Add(labels);
    c.rejected = ByReason(rejected, labels);
    c.met = &met.Add(labels);
    c.missed = &missed.Add(labels);
    c.degraded = &degraded.Add(labels);
    c.failed = ByReason(failed, labels);
    c.queue_seconds = &queue.Add(labels, kLatencySeconds);
    c.end_to_end_seconds = &end_to_end.Add(labels, kLatencySeconds);
  }
  return classes;
}

Labels With(Labels labels, const char* key, std::string_view value) {
  labels[key] = std::string(value);
  return labels;
}

// What a scrape reads of the process and its memory, by the names that other exporters use too.
class LiveCollector final : public prometheus::Collectable {
 public:
  explicit LiveCollector(const MemoryBudget* memory) : memory_(memory) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    using prometheus::MetricType;
    const ProcessUse use = ReadProcessUse();
    std::vector<prometheus::MetricFamily> families = {
        Family("process_resident_memory_bytes", "Resident memory size in bytes.", MetricType::Gauge,
               static_cast<double>(use.resident_bytes)),
        Family("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
               MetricType::Counter, use.cpu_seconds),
        Family("process_open_fds", "Number of open file descriptors.", MetricType::Gauge,
               static_cast<double>(use.open_fds)),
        Family("process_start_time_seconds",
               "Start time of the process since unix epoch in seconds.", MetricType::Gauge,
               use.start_time_seconds)};
    if (memory_ == nullptr) return families;
    families.push_back(Family("saccade_memory_limit_bytes", "The memory budget of the process.",
                              MetricType::Gauge, static_cast<double>(memory_->limit())));
    prometheus::MetricFamily held{"saccade_memory_held_bytes",
                                  "Bytes of the memory budget that are held, by what for.",
                                  MetricType::Gauge,
                                  {}};
    for (size_t k = 0; k < kMemoryKinds; ++k) {
      prometheus::ClientMetric metric;
      metric.label = {{"kind", std::string(kMemoryKindNames[k])}};
      metric.gauge.value = static_cast<double>(memory_->held(static_cast<MemoryKind>(k)));
      held.metric.push_back(std::move(metric));
    }
    families.push_back(std::move(held));
    return families;
  }

 private:
  static prometheus::MetricFamily Family(const char* name, const char* help,
                                         prometheus::MetricType type, double value) {
    prometheus::ClientMetric metric;
    (type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    return {name, help, type, {metric}};
  }
  const MemoryBudget* const memory_;
};

}  // namespace

// Families whose label is the model; a name's series are added when it is first served.
struct Metrics::ModelFamilies {
  explicit ModelFamilies(Maker make)
      : blocks(make.Gauges(
            "saccade_kv_blocks",
            "K/V blocks of a partition: free to take, held by sequences, or idle in the cache.")),
        hits(make.Counters("saccade_kv_hit_tokens_total",
                           "Prompt tokens whose K/V were in the cache.")),
        misses(make.Counters("saccade_kv_miss_tokens_total",
                             "Prompt tokens whose K/V had to be computed.")),
        ratio(make.Gauges("saccade_kv_hit_ratio",
                          "Moving average of the hit rate per lookup (0.9 old, 0.1 new).")),
        evicted(make.Counters("saccade_kv_evicted_blocks_total",
                              "Cached K/V blocks that lost their content.")),
        predicted(make.Histograms("saccade_step_predicted_seconds",
                                  "Predicted time of a model step, by what it holds.")),
        taken(make.Histograms("saccade_step_taken_seconds",
                              "Measured time of a model step, by what it holds.")),
        sequences(
            make.Histograms("saccade_batch_sequences", "Sequences batched in one model step.")),
        rows(make.Histograms("saccade_batch_rows", "Token rows batched in one model step.")),
        loaded(make.Gauges("saccade_model_loads", "Loads of a model that take requests now.")),
        sessions(make.Gauges("saccade_sessions", "Open sessions.")),
        received(make.Counters("saccade_frames_received_total", "Camera frames received.")),
        superseded(
            make.Counters("saccade_frames_superseded_total",
                          "Camera frames replaced by a newer one before a request used them.")),
        stale(make.Counters("saccade_frames_stale_total",
                            "Camera frames refused as older than the one in place.")),
        rejected(
            make.Counters("saccade_frames_rejected_total", "Camera frames refused, by reason.")),
        age(make.Histograms("saccade_frame_age_seconds",
                            "Age of the oldest frame behind an action when the action was ready.")),
        cache_hits(make.Counters("saccade_vision_cache_hits_total",
                                 "Frames whose vision embeddings were in the cache.")),
        cache_misses(
            make.Counters("saccade_vision_cache_misses_total", "Frames that had to be encoded.")),
        invalid(make.Counters("saccade_invalid_action_tokens_total",
                              "Decoded tokens outside the action range.")),
        non_finite(
            make.Counters("saccade_non_finite_total", "Requests failed because of NaN or Inf.")),
        generated(make.Counters("saccade_generated_tokens_total",
                                "Tokens of texts that were answered.")) {}

  ModelMetrics Make(const std::string& name) {
    const Labels labels = {{"model", name}};
    ModelMetrics m;
    for (size_t i = 0; i < kModalities; ++i) {
      const Labels of_part = With(labels, "partition", kModalityNames[i]);
      PartitionMetrics& p = m.partitions[i];
      p.free_blocks = &blocks.Add(With(of_part, "state", "free"));
      p.held_blocks = &blocks.Add(With(of_part, "state", "held"));
      p.idle_blocks = &blocks.Add(With(of_part, "state", "idle"));
      p.hit_tokens = &hits.Add(of_part);
      p.miss_tokens = &misses.Add(of_part);
      p.hit_rate = &ratio.Add(of_part);
      for (size_t r = 0; r < kEvictionReasons; ++r) {
        p.evictions[r] = &evicted.Add(With(of_part, "reason", kEvictionReasonNames[r]));
      }
    }
    for (size_t k = 0; k < kStepKinds; ++k) {
      const Labels with_kind = With(labels, "kind", kStepKindNames[k]);
      m.steps[k] = {&predicted.Add(with_kind, kStepSeconds), &taken.Add(with_kind, kStepSeconds)};
    }
    m.batch_sequences = &sequences.Add(labels, kSequences);
    m.batch_rows = &rows.Add(labels, kRows);
    m.loads = &loaded.Add(labels);
    m.sessions = &sessions.Add(labels);
    m.frames_received = &received.Add(labels);
    m.frames_superseded = &superseded.Add(labels);
    m.frames_stale = &stale.Add(labels);
    m.frames_rejected = ByReason(rejected, labels);
    m.frame_age_seconds = &age.Add(labels, kAgeSeconds);
    m.vision_cache_hits = &cache_hits.Add(labels);
    m.vision_cache_misses = &cache_misses.Add(labels);
    m.invalid_action_tokens = &invalid.Add(labels);
    m.non_finite = &non_finite.Add(labels);
    m.generated_tokens = &generated.Add(labels);
    return m;
  }

  Family<Gauge>& blocks;
  Family<Counter>& hits;
  Family<Counter>& misses;
  Family<Gauge>& ratio;
  Family<Counter>& evicted;
  Family<Histogram>& predicted;
  Family<Histogram>& taken;
  Family<Histogram>& sequences;
  Family<Histogram>& rows;
  Family<Gauge>& loaded;
  Family<Gauge>& sessions;
  Family<Counter>& received;
  Family<Counter>& superseded;
  Family<Counter>& stale;
  Family<Counter>& rejected;
  Family<Histogram>& age;
  Family<Counter>& cache_hits;
  Family<Counter>& cache_misses;
  Family<Counter>& invalid;
  Family<Counter>& non_finite;
  Family<Counter>& generated;
};

ModelMetrics& Metrics::model(const std::string& name) {
  const std::lock_guard lock(models_mu_);
  const auto it = models_.find(name);
  return it != models_.end() ? it->second
                             : models_.emplace(name, families_->Make(name)).first->second;
}

void PartitionMetrics::RecordLookup(uint64_t hit, uint64_t miss) {
  if (hit + miss == 0) return;
  hit_tokens->Increment(static_cast<double>(hit));
  miss_tokens->Increment(static_cast<double>(miss));
  hit_rate_ema =
      0.9 * hit_rate_ema + 0.1 * static_cast<double>(hit) / static_cast<double>(hit + miss);
  hit_rate->Set(hit_rate_ema);
}

void ModelMetrics::RecordStep(StepKind kind, std::chrono::microseconds predicted,
                              std::chrono::microseconds taken, uint64_t sequences,
                              uint64_t rows) const {
  const StepMetrics& step = steps[static_cast<size_t>(kind)];
  step.predicted_seconds->Observe(ToSeconds(predicted));
  step.taken_seconds->Observe(ToSeconds(taken));
  batch_sequences->Observe(static_cast<double>(sequences));
  batch_rows->Observe(static_cast<double>(rows));
}

Metrics::Metrics(const MetricsOptions& options)
    : registry_(std::make_shared<prometheus::Registry>()),
      live_(std::make_shared<LiveCollector>(options.memory)),
      backend_names_(options.backends) {
  Maker make(*registry_);
  classes_ = MakeClasses(make, options);
  families_ = std::make_unique<ModelFamilies>(make);
  for (const std::string& name : options.models) model(name);
  auto& worker_up =
      make.Gauges("saccade_worker_up", "1 while the worker of this backend takes steps.");
  for (const std::string& name : options.backends)
    backends_.push_back({&worker_up.Add({{"backend", name}})});
  backend_info_ = &make.Gauges("saccade_backend_info", "1; the labels say what a backend runs on.");
  make.Gauges("saccade_build_info", "1; the labels say what was built.")
      .Add({{"version", options.version}, {"compiler", Compiler()}})
      .Set(1);
  streams = &make.Gauges("saccade_streams", "Connected Session streams, opened or not.").Add({});
  ready = &make.Gauges("saccade_ready", "1 while the health service answers SERVING.").Add({});
  refused =
      ByReason(make.Counters("saccade_requests_refused_total",
                             "Requests refused before they had a model or a class, by reason."),
               {});
}

Metrics::~Metrics() = default;

void Metrics::SetBackendInfo(WorkerId id, std::string_view kind, std::string_view description) {
  backend_info_
      ->Add({{"backend", backend_names_[static_cast<size_t>(id.value())]},
             {"kind", std::string(kind)},
             {"description", std::string(description)}})
      .Set(1);
}

std::string Metrics::Serialize() const {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collectable : collectables()) {
    for (prometheus::MetricFamily& family : collectable->Collect())
      families.push_back(std::move(family));
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace saccade
