#include "metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <map>

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

std::vector<ClassMetrics> MakeClasses(Maker& make, const std::vector<std::string>& names) {
  auto& admitted =
      make.Counters("saccade_requests_admitted_total", "Act requests admitted, by latency class.");
  auto& rejected = make.Counters("saccade_requests_rejected_total",
                                 "Act requests refused at admission, by latency class and reason.");
  auto& met = make.Counters("saccade_requests_met_total",
                            "Act requests answered by their deadline, or having none.");
  auto& missed = make.Counters("saccade_requests_missed_total",
                               "Admitted act requests answered late or expired.");
  auto& failed =
      make.Counters("saccade_requests_failed_total",
                    "Admitted act requests that ended without an answer for another reason.");
  auto& queue = make.Histograms("saccade_queue_seconds",
                                "From the arrival of an act request to its first model step.");
  auto& end_to_end = make.Histograms("saccade_end_to_end_seconds",
                                     "From the arrival of an act request to its last answer.");
  std::vector<ClassMetrics> classes;
  for (const std::string& name : names) {
    const Labels labels = {{"class", name}};
    ClassMetrics& c = classes.emplace_back();
    c.admitted = &admitted.Add(labels);
    c.rejected = ByReason(rejected, labels);
    c.met = &met.Add(labels);
    c.missed = &missed.Add(labels);
    c.failed = ByReason(failed, labels);
    c.queue_seconds = &queue.Add(labels, kLatencySeconds);
    c.end_to_end_seconds = &end_to_end.Add(labels, kLatencySeconds);
  }
  return classes;
}

void MakePartitions(Maker& make, const std::vector<std::string>& names,
                    std::vector<ModelMetrics>& models) {
  auto& blocks = make.Gauges(
      "saccade_kv_blocks",
      "K/V blocks of a partition: free to take, held by sequences, or idle in the cache.");
  auto& hits =
      make.Counters("saccade_kv_hit_tokens_total", "Prompt tokens whose K/V were in the cache.");
  auto& misses =
      make.Counters("saccade_kv_miss_tokens_total", "Prompt tokens whose K/V had to be computed.");
  auto& ratio = make.Gauges("saccade_kv_hit_ratio",
                            "Moving average of the hit rate per lookup (0.9 old, 0.1 new).");
  auto& evicted = make.Counters("saccade_kv_evicted_blocks_total",
                                "Cached K/V blocks that lost their content.");
  for (size_t i = 0; i < names.size(); ++i) {
    for (size_t m = 0; m < kModalities; ++m) {
      const Labels labels = {{"model", names[i]}, {"partition", std::string(kModalityNames[m])}};
      const auto with = [&](const char* key, std::string_view value) {
        Labels more = labels;
        more[key] = std::string(value);
        return more;
      };
      PartitionMetrics& p = models[i].partitions[m];
      p.free_blocks = &blocks.Add(with("state", "free"));
      p.held_blocks = &blocks.Add(with("state", "held"));
      p.idle_blocks = &blocks.Add(with("state", "idle"));
      p.hit_tokens = &hits.Add(labels);
      p.miss_tokens = &misses.Add(labels);
      p.hit_rate = &ratio.Add(labels);
      for (size_t r = 0; r < kEvictionReasons; ++r) {
        p.evictions[r] = &evicted.Add(with("reason", kEvictionReasonNames[r]));
      }
    }
  }
}

std::vector<ModelMetrics> MakeModels(Maker& make, const std::vector<std::string>& names) {
  std::vector<ModelMetrics> models(names.size());
  MakePartitions(make, names, models);
  auto& predicted = make.Histograms("saccade_step_predicted_seconds",
                                    "Predicted time of a model step, by what it holds.");
  auto& taken = make.Histograms("saccade_step_taken_seconds",
                                "Measured time of a model step, by what it holds.");
  auto& sequences =
      make.Histograms("saccade_batch_sequences", "Sequences batched in one model step.");
  auto& rows = make.Histograms("saccade_batch_rows", "Token rows batched in one model step.");
  auto& sessions = make.Gauges("saccade_sessions", "Open sessions.");
  auto& received = make.Counters("saccade_frames_received_total", "Camera frames received.");
  auto& superseded =
      make.Counters("saccade_frames_superseded_total",
                    "Camera frames replaced by a newer one before a request used them.");
  auto& stale = make.Counters("saccade_frames_stale_total",
                              "Camera frames refused as older than the one in place.");
  auto& rejected =
      make.Counters("saccade_frames_rejected_total", "Camera frames refused, by reason.");
  auto& age =
      make.Histograms("saccade_frame_age_seconds",
                      "Age of the oldest frame behind an action when the action was ready.");
  auto& cache_hits = make.Counters("saccade_vision_cache_hits_total",
                                   "Frames whose vision embeddings were in the cache.");
  auto& cache_misses =
      make.Counters("saccade_vision_cache_misses_total", "Frames that had to be encoded.");
  auto& invalid = make.Counters("saccade_invalid_action_tokens_total",
                                "Decoded tokens outside the action range.");
  auto& non_finite =
      make.Counters("saccade_non_finite_total", "Requests failed because of NaN or Inf.");
  auto& generated =
      make.Counters("saccade_generated_tokens_total", "Tokens of texts that were answered.");
  for (size_t i = 0; i < names.size(); ++i) {
    const Labels labels = {{"model", names[i]}};
    ModelMetrics& m = models[i];
    for (size_t k = 0; k < kStepKinds; ++k) {
      const Labels with_kind = {{"model", names[i]}, {"kind", std::string(kStepKindNames[k])}};
      m.steps[k] = {&predicted.Add(with_kind, kStepSeconds), &taken.Add(with_kind, kStepSeconds)};
    }
    m.batch_sequences = &sequences.Add(labels, kSequences);
    m.batch_rows = &rows.Add(labels, kRows);
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
  }
  return models;
}

}  // namespace

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
    : registry_(std::make_shared<prometheus::Registry>()), backend_names_(options.backends) {
  Maker make(*registry_);
  classes_ = MakeClasses(make, options.classes);
  models_ = MakeModels(make, options.models);
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

void Metrics::SetBackendInfo(WorkerId id, std::string_view kind, std::string_view description) {
  backend_info_
      ->Add({{"backend", backend_names_[static_cast<size_t>(id.value())]},
             {"kind", std::string(kind)},
             {"description", std::string(description)}})
      .Set(1);
}

std::string Metrics::Serialize() const {
  return prometheus::TextSerializer().Serialize(registry_->Collect());
}

}  // namespace saccade
