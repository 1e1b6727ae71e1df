#include "tests/sim/run.h"

#include <gtest/gtest-spi.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/strings.h"
#include "sched/cost_model.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

constexpr size_t kLearning = 200;    // requests before capacity is measured
constexpr size_t kMeasured = 3'000;  // requests that it is measured on
constexpr size_t kMaxFailures = 8;
constexpr uint32_t kMaxTier = 15;

double Percentile(std::vector<float>& values, double part) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

Micros FromSeconds(double s) { return Micros(std::llround(s * 1e6)); }

// Step times learned from recorded steps: the price of a shape, times what a recorded step took
// more or less than its own price.
class RecordedTimes {
 public:
  explicit RecordedTimes(const std::vector<StepLine>& steps) {
    for (int round = 0; round < 2; ++round) {
      for (const StepLine& step : steps) {
        const StepShape shape{step.frames, step.prefill, step.decode};
        const auto took = Micros(static_cast<int64_t>(step.took_us));
        Model& model = models_[step.model];
        if (round == 0) {
          model.prices.Observe(shape, took);
        } else {
          const auto price = static_cast<double>(model.prices.Predict(shape).p50.count());
          if (price > 0) model.ratios.push_back(static_cast<double>(step.took_us) / price);
        }
      }
    }
  }
  // Nothing is known of a model without a recorded step.
  bool Knows(uint32_t model) const { return models_.contains(model); }
  double Next(uint32_t model, const StepPlan& plan, Random& random) const {
    const Model& m = models_.at(model);
    const double ratio =
        m.ratios.empty() ? 1 : m.ratios[random.Below(static_cast<uint32_t>(m.ratios.size()))];
    const CostPrediction price = plan.slice.whole()
                                     ? m.prices.Predict(plan.shape)
                                     : m.prices.Predict(plan.shape, plan.slice.share);
    return static_cast<double>(price.p50.count()) * ratio;
  }

 private:
  struct Model {
    CostModel prices;
    std::vector<double> ratios;
  };
  std::map<uint32_t, Model> models_;
};

class Runner {
 public:
  Runner(const Scenario& s, const RunFaults& options)
      : s_(s), faults_(options), random_(s.seed), recorded_(s.steps), noise_(s.seed ^ 0x5eed) {}

  Report RunOpen(double scale);
  Capacity RunBackToBack(uint32_t at_hand);

 private:
  struct Session {
    const ClientLine* client = nullptr;
    size_t group = 0;
    uint64_t number = 0;  // session id
    double late_us = 0;   // of the newest request, behind its beat
    std::vector<uint64_t> frames;
  };
  // Beside a request of the simulation.
  struct Note {
    size_t group = 0;
    bool judged = false;
    bool withdrawn = false;
    uint64_t lower_before = 0;  // steps of lower tiers that started before it came
    uint32_t overtaken = 0;
  };

  void MakeSimulation(bool back_to_back);
  void MakeSessions();
  Spec SpecOf(Session& session);
  size_t Offer(Spec spec, size_t group);
  void Arrive(size_t session, double gap_scale);
  double Gap(Session& session, double scale);
  void Misbehave(size_t request, const ClientLine& client);
  void ScheduleEvents();
  void ScheduleRecorded();
  void ScheduleEvent(const EventLine& event, TimePoint at);
  CostsLine CostsAt(uint32_t model, TimePoint now) const;
  double StepUs(const StepPlan& plan);
  void OnStart(const StepPlan& plan, Micros took);
  void Judge(Report& report);
  void Expect(Report& report) const;
  std::optional<double> MetricOf(const Report& report, const ExpectLine& line) const;
  size_t ClassIndex(const std::string& name) const;
  bool Drain(Micros limit);

  const Scenario& s_;
  const RunFaults faults_;
  Random random_;
  RecordedTimes recorded_;
  Random noise_;
  std::unique_ptr<Simulation> sim_;
  TimePoint begin_{};
  TimePoint end_{};
  std::vector<Session> sessions_;
  std::vector<Note> notes_;  // by request
  std::vector<double> class_us_;
  std::map<uint64_t, double> group_us_;
  std::vector<uint64_t> lower_steps_;  // [t]: steps started without work of tier t or above it
  uint64_t next_frame_ = 1'000'000;
  uint64_t steps_ = 0;
  TimePoint last_end_{};
  double gap_us_ = 0;
  std::unordered_map<uint64_t, size_t> by_recorded_id_;
  testing::TestPartResultArray failures_;
};

size_t Runner::ClassIndex(const std::string& name) const {
  for (size_t i = 0; i < s_.classes.size(); ++i) {
    if (s_.classes[i].name == name) return i;
  }
  return 0;  // the parser has checked names; shrinking keeps every class
}

void Runner::MakeSimulation(bool back_to_back) {
  constexpr Modality kPreferred[] = {Modality::kAction, Modality::kVision, Modality::kText};
  Options options;
  for (const ClassLine& c : s_.classes) {
    LatencyClass k = Class(c.name, c.tier, static_cast<int64_t>(c.deadline_us),
                           c.on_late == 0 ? OnLate::kReject : OnLate::kRunLate, c.max_queued,
                           c.shares, kPreferred[c.preferred]);
    if (back_to_back) {
      k.tier = 0;
      k.deadline = Micros(0);
      k.on_late = OnLate::kRunLate;
      k.max_queued = 4096;
    }
    options.scheduler.classes.push_back(k);
  }
  options.scheduler.step_ceiling = Micros(static_cast<int64_t>(s_.scheduler.ceiling_us));
  options.scheduler.pipeline_depth = s_.scheduler.depth;
  options.scheduler.min_prefill_chunk = s_.scheduler.min_chunk;
  options.scheduler.max_wait = Micros(static_cast<int64_t>(s_.scheduler.max_wait_us));
  options.scheduler.ageing_share = s_.scheduler.ageing_share;
  for (const LaneLine& l : s_.lanes) {
    LaneOptions lane =
        Lane(static_cast<int32_t>(l.worker), static_cast<int32_t>(l.model), l.blocks);
    lane.kv.block_tokens = l.block_tokens;
    lane.kv.headroom = std::min(l.headroom, l.blocks - 1);
    lane.embedding_slots = l.embeddings;
    lane.sequence_slots = l.slots;
    lane.max_rows = l.rows;
    lane.max_frames = l.frames;
    lane.max_logit_rows = l.logits;
    lane.max_action_tokens = l.action_tokens;
    if (l.vision_layers > 0) lane.vision_layers = EvenLayers(l.vision_layers);
    if (l.trunk_layers > 0) lane.trunk_layers = EvenLayers(l.trunk_layers, l.head);
    options.lanes.push_back(lane);
  }
  options.seed = s_.seed;
  options.check_every = s_.verify && !back_to_back ? 16 : 1024;
  options.keep_steps = false;
  options.verify = s_.verify && !back_to_back;
  options.lose_rows = faults_.lose_rows;
  options.step_us = [this](const StepPlan& plan) { return StepUs(plan); };
  options.on_start = [this](const StepPlan& plan, Micros took) { OnStart(plan, took); };
  class_us_.assign(s_.classes.size(), 0);
  lower_steps_.assign(kMaxTier + 1, 0);
  sim_ = std::make_unique<Simulation>(std::move(options));
  begin_ = last_end_ = sim_->now();
  end_ = begin_ + FromSeconds(s_.warmup + s_.seconds);
}

void Runner::MakeSessions() {
  for (size_t c = 0; c < s_.clients.size(); ++c) {
    for (uint32_t i = 0; i < s_.clients[c].count; ++i) {
      Session session;
      session.client = &s_.clients[c];
      session.group = s_.classes.size() + c;
      session.number = (c + 1) * 1'000 + i;
      sessions_.push_back(session);
    }
  }
}

Spec Runner::SpecOf(Session& session) {
  const ClientLine& c = *session.client;
  Spec spec;
  spec.klass = static_cast<uint32_t>(ClassIndex(c.klass));
  spec.model = c.model;
  spec.session = session.number;
  if (session.frames.size() != c.cameras || !random_.Chance(c.repeat)) {
    session.frames.resize(c.cameras);
    for (uint64_t& frame : session.frames) frame = ++next_frame_;
  }
  const uint64_t text = c.new_texts != 0 ? random_.Next() : c.shared_text != 0 ? 1 : session.number;
  // A prompt has something to compute even where both are zero: its first token.
  spec.timeline = sim_->Prompt(session.frames, c.text, text, c.vision_tokens);
  spec.action_tokens = c.action_tokens;
  spec.samples = c.samples;
  spec.temperature = static_cast<float>(c.temperature);
  spec.seed = random_.Below(1000);
  if (c.deadline_us > 0) spec.deadline = Micros(static_cast<int64_t>(c.deadline_us));
  return spec;
}

size_t Runner::Offer(Spec spec, size_t group) {
  Note note;
  note.group = group;
  note.judged = sim_->now() >= begin_ + FromSeconds(s_.warmup);
  note.lower_before = lower_steps_[s_.classes[spec.klass].tier];
  notes_.push_back(note);
  return sim_->Offer(std::move(spec));
}

double Runner::Gap(Session& session, double scale) {
  const ClientLine& client = *session.client;
  const double period = 1e6 / (client.rate * scale);
  switch (client.arrival) {
    case 0: {
      // Around a beat that keeps its time.
      const double late = period * client.jitter * random_.Uniform();
      return period + late - std::exchange(session.late_us, late);
    }
    case 1:
      return -period * std::log(1 - random_.Uniform());
    default:
      return period * client.burst;
  }
}

void Runner::Arrive(size_t index, double scale) {
  Session& session = sessions_[index];
  const ClientLine& c = *session.client;
  const TimePoint stop = c.stop > 0 ? begin_ + FromSeconds(s_.warmup + c.stop) : end_;
  if (sim_->now() >= std::min(stop, end_)) return;
  const uint32_t many = c.arrival == 2 ? c.burst : 1;
  for (uint32_t i = 0; i < many; ++i) {
    Spec spec = SpecOf(session);
    if (c.announce > 0 && random_.Chance(c.announce)) {
      spec.next = Micros(std::llround(1e6 / (c.rate * scale) - session.late_us));
    }
    Misbehave(Offer(std::move(spec), session.group), c);
  }
  const double gap = std::max(1.0, Gap(session, scale));
  sim_->After(Micros(std::llround(gap)), [this, index, scale] { Arrive(index, scale); });
}

void Runner::Misbehave(size_t request, const ClientLine& c) {
  if (!sim_->request(request).offered.ok()) return;
  const auto delay = [&] {
    return Micros(static_cast<int64_t>(random_.Uniform() * static_cast<double>(c.cancel_us)));
  };
  if (random_.Chance(c.cancel)) {
    sim_->After(delay(), [this, request] {
      if (!sim_->request(request).outcome) notes_[request].withdrawn = true;
      sim_->Cancel(request);
    });
  }
  if (random_.Chance(c.end_session)) {
    const uint64_t session = sim_->request(request).spec.session;
    sim_->After(delay(), [this, request, session] {
      for (size_t i = request > 512 ? request - 512 : 0; i < notes_.size(); ++i) {
        const Tracked& r = sim_->request(i);
        if (r.spec.session == session && r.offered.ok() && !r.outcome) notes_[i].withdrawn = true;
      }
      sim_->CancelSession(session);
    });
  }
  if (random_.Chance(c.non_finite)) {
    notes_[request].withdrawn = true;  // its own fault, not the scheduler's
    sim_->MakeNonFinite(request, 0, random_.Below(c.action_tokens));
  }
}

void Runner::ScheduleEvent(const EventLine& event, TimePoint at) {
  sim_->After(ToMicros(at - sim_->now()), [this, &event, at] {
    const auto worker = static_cast<int32_t>(event.worker);
    const Micros us(static_cast<int64_t>(event.us));
    switch (event.kind) {
      case 0:
        sim_->FailRunningStep(worker);
        break;
      case 1:
        sim_->LoseWorker(worker);
        break;
      case 2:
        sim_->Hang(worker, us);
        break;
      default:
        sim_->Suspend(us);
        break;
    }
    if (event.every <= 0) return;
    const TimePoint next = std::max(sim_->now(), at + FromSeconds(event.every));
    if (next < end_) ScheduleEvent(event, next);
  });
}

void Runner::ScheduleEvents() {
  for (const EventLine& event : s_.events) {
    ScheduleEvent(event, begin_ + FromSeconds(s_.warmup + event.at));
  }
}

void Runner::ScheduleRecorded() {
  if (s_.arrivals.empty()) return;
  const uint64_t span =
      std::max(s_.arrivals.back().us + 1, s_.steps.empty() ? 0 : s_.steps.back().us);
  for (uint32_t round = 0; round < s_.repeat; ++round) {
    const uint64_t shift = round * span;
    for (const ArriveLine& a : s_.arrivals) {
      sim_->After(Micros(static_cast<int64_t>(shift + a.us)), [this, &a, shift] {
        Spec spec;
        spec.klass = static_cast<uint32_t>(ClassIndex(a.klass));
        spec.model = a.model;
        spec.session = a.session;
        std::vector<uint64_t> frames = a.frames;
        for (uint64_t& frame : frames) frame = Mix(shift, frame);
        spec.timeline = sim_->Prompt(frames, a.text, a.text_id, a.vision_tokens);
        spec.action_tokens = a.action_tokens;
        spec.samples = a.samples;
        if (a.deadline_us > 0) spec.deadline = Micros(static_cast<int64_t>(a.deadline_us));
        by_recorded_id_[a.id] = Offer(std::move(spec), std::numeric_limits<size_t>::max());
      });
    }
    for (const GoneLine& g : s_.gone) {
      sim_->After(Micros(static_cast<int64_t>(shift + g.us)), [this, &g] {
        if (g.id == 0) {
          sim_->CancelSession(g.session);
          return;
        }
        const auto it = by_recorded_id_.find(g.id);
        if (it == by_recorded_id_.end()) return;
        if (!sim_->request(it->second).outcome) notes_[it->second].withdrawn = true;
        sim_->Cancel(it->second);
      });
    }
  }
}

// What steps of a model cost at a time.
CostsLine Runner::CostsAt(uint32_t model, TimePoint now) const {
  CostsLine line;
  for (const CostsLine& c : s_.costs) {
    if (c.model == model) line = c;
  }
  const TimePoint start = begin_ + FromSeconds(s_.warmup);
  for (const CostChange& change : s_.changes) {
    const TimePoint at = start + FromSeconds(change.at);
    if (change.costs.model != model || now < at) continue;
    const double into = static_cast<double>(ToMicros(now - at).count()) / 1e6;
    const double part = change.over <= 0 ? 1 : std::min(1.0, into / change.over);
    const auto move = [part](double& from, double to) { from += part * (to - from); };
    move(line.vision_base, change.costs.vision_base);
    move(line.frame, change.costs.frame);
    move(line.trunk_base, change.costs.trunk_base);
    move(line.prefill_row, change.costs.prefill_row);
    move(line.decode_row, change.costs.decode_row);
    move(line.noise, change.costs.noise);
    move(line.slice, change.costs.slice);
    move(line.hiccup, change.costs.hiccup);
    move(line.hiccup_us, change.costs.hiccup_us);
  }
  return line;
}

double Runner::StepUs(const StepPlan& plan) {
  const auto model = static_cast<uint32_t>(plan.model.value());
  if (recorded_.Knows(model)) return recorded_.Next(model, plan, noise_);
  const CostsLine line = CostsAt(model, sim_->now());
  double us = TrueCosts{line.vision_base, line.frame, line.trunk_base, line.prefill_row,
                        line.decode_row,  0,          line.slice}
                  .Of(plan);
  us *= 1 + line.noise * (2 * noise_.Uniform() - 1);
  if (noise_.Chance(line.hiccup)) us += line.hiccup_us;
  return us;
}

// Time of a step goes to those in it by the prices of their parts; its base is shared alike.
void Runner::OnStart(const StepPlan& plan, Micros took) {
  ++steps_;
  const CostsLine costs = CostsAt(static_cast<uint32_t>(plan.model.value()), TimePoint{});
  std::vector<std::pair<size_t, double>> parts;  // request, price
  const double base = costs.trunk_base / 8.0;
  for (const EncodeItem& item : plan.encodes) {
    parts.emplace_back(item.request.value() - 1, costs.frame + costs.vision_base / 8.0);
  }
  for (const TrunkItem& item : plan.trunk) {
    const bool decode = item.slot.valid() && item.count == 1;
    parts.emplace_back(item.request.value() - 1,
                       base + item.count * (decode ? costs.decode_row : costs.prefill_row));
  }
  uint32_t best = kMaxTier;
  const auto tier_of = [&](size_t r) { return s_.classes[sim_->request(r).spec.klass].tier; };
  for (const auto& [r, part] : parts) best = std::min(best, tier_of(r));
  for (uint32_t t = 0; t < best; ++t) ++lower_steps_[t];
  for (const auto& [r, part] : parts) {
    if (sim_->request(r).first_start) continue;
    notes_[r].overtaken = static_cast<uint32_t>(lower_steps_[tier_of(r)] - notes_[r].lower_before);
  }
  const TimePoint now = sim_->now();
  gap_us_ = std::max(gap_us_, static_cast<double>(took.count()));
  if (now < begin_ + FromSeconds(s_.warmup) || now >= end_) return;
  double weight = 0;
  for (const auto& [r, part] : parts) weight += part;
  if (weight <= 0) return;
  for (const auto& [r, part] : parts) {
    const double us = part / weight * static_cast<double>(took.count());
    class_us_[sim_->request(r).spec.klass] += us;
    group_us_[notes_[r].group] += us;
  }
}

bool Runner::Drain(Micros limit) {
  const TimePoint until = end_ + limit;
  while (failures_.size() == 0 && sim_->Step()) {
    if (sim_->now() > until) {
      ADD_FAILURE() << "not idle " << limit.count() << " us after the last arrival";
      return false;
    }
  }
  return failures_.size() == 0;
}

Report Runner::RunOpen(double scale) {
  const auto wall = std::chrono::steady_clock::now();
  Report report;
  report.scale = scale;
  {
    testing::ScopedFakeTestPartResultReporter catcher(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures_);
    MakeSimulation(false);
    MakeSessions();
    ScheduleEvents();
    ScheduleRecorded();
    for (size_t i = 0; i < sessions_.size(); ++i) {
      const ClientLine& c = *sessions_[i].client;
      const double start = c.start > 0 ? s_.warmup + c.start : 0;
      // Sessions are out of step with each other.
      const double phase = c.arrival == 2 ? 0 : random_.Uniform() / (c.rate * scale);
      sim_->After(FromSeconds(start + phase), [this, i, scale] { Arrive(i, scale); });
    }
    if (Drain(Micros(600'000'000))) sim_->ExpectBaseline();
  }
  for (int i = 0; i < failures_.size() && report.failures.size() < kMaxFailures; ++i) {
    report.failures.emplace_back(failures_.GetTestPartResult(i).message());
  }
  Judge(report);
  if (failures_.size() == 0) Expect(report);
  report.took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count();
  return report;
}

void Runner::Judge(Report& report) {
  report.simulated_s = static_cast<double>(ToMicros(sim_->now() - begin_).count()) / 1e6;
  report.requests = sim_->requests().size();
  report.steps = steps_;
  report.gap_us = gap_us_;
  for (const ClassLine& c : s_.classes) report.groups.push_back({.name = c.name});
  for (const ClientLine& c : s_.clients) report.groups.push_back({.name = c.name});
  std::vector<std::vector<float>> waits(report.groups.size());
  std::vector<std::vector<float>> latencies(report.groups.size());
  for (size_t i = 0; i < notes_.size(); ++i) {
    const Note& note = notes_[i];
    if (!note.judged || note.withdrawn) continue;
    const Tracked& r = sim_->request(i);
    for (const size_t g : {size_t{r.spec.klass}, note.group}) {
      if (g >= report.groups.size()) continue;
      Group& group = report.groups[g];
      ++group.offered;
      if (!r.offered.ok()) ++group.refused;
      if (r.first_start) {
        const auto wait = static_cast<float>(ToMicros(*r.first_start - r.arrival).count());
        waits[g].push_back(wait);
        group.wait_max_us = std::max<double>(group.wait_max_us, wait);
        group.overtaken = std::max(group.overtaken, note.overtaken);
      }
      if (!r.ok()) continue;
      ++group.answered;
      group.met += r.outcome->late ? 0 : 1;
      latencies[g].push_back(static_cast<float>(r.latency().count()));
    }
  }
  std::vector<uint32_t> workers;
  for (const LaneLine& lane : s_.lanes) workers.push_back(lane.worker);
  std::sort(workers.begin(), workers.end());
  const auto worker_count = std::unique(workers.begin(), workers.end()) - workers.begin();
  const double seconds = std::max(1e-6, report.simulated_s - s_.warmup);
  const double judged_us = 1e6 * std::min(s_.seconds, seconds) * static_cast<double>(worker_count);
  for (size_t g = 0; g < report.groups.size(); ++g) {
    Group& group = report.groups[g];
    group.share = (g < class_us_.size() ? class_us_[g] : group_us_[g]) / judged_us;
    group.per_second = static_cast<double>(group.answered) / std::min(s_.seconds, seconds);
    group.wait_p99_us = Percentile(waits[g], 0.99);
    group.latency_p99_us = Percentile(latencies[g], 0.99);
  }
}

std::optional<double> Runner::MetricOf(const Report& report, const ExpectLine& line) const {
  Group all;
  for (size_t c = 0; c < s_.classes.size(); ++c) {
    const Group& g = report.groups[c];
    all.offered += g.offered;
    all.met += g.met;
    all.answered += g.answered;
    all.refused += g.refused;
    all.share += g.share;
    all.per_second += g.per_second;
    all.wait_max_us = std::max(all.wait_max_us, g.wait_max_us);
    all.wait_p99_us = std::max(all.wait_p99_us, g.wait_p99_us);
    all.latency_p99_us = std::max(all.latency_p99_us, g.latency_p99_us);
    all.overtaken = std::max(all.overtaken, g.overtaken);
  }
  const Group* const found = line.of.empty() ? &all : report.Find(line.of);
  if (found == nullptr) return std::nullopt;
  const Group& g = *found;
  const std::string& m = line.metric;
  if (m == "offered") return static_cast<double>(g.offered);
  if (m == "met") return g.Part(g.met);
  if (m == "answered") return g.Part(g.answered);
  if (m == "refused") return g.Part(g.refused);
  if (m == "late") return g.Part(g.answered - g.met);
  if (m == "share") return g.share;
  if (m == "per_second") return g.per_second;
  if (m == "wait_p99_us") return g.wait_p99_us;
  if (m == "wait_max_us") return g.wait_max_us;
  if (m == "overtaken") return g.overtaken;
  if (m == "latency_p99_us") return g.latency_p99_us;
  if (m == "gap_us") return report.gap_us;
  if (m != "recovery_us") return std::nullopt;
  // Until the arrival of the last one that was not met.
  const auto index = static_cast<size_t>(found - report.groups.data());
  const TimePoint from = begin_ + FromSeconds(s_.warmup + line.after);
  TimePoint last = from;
  for (size_t i = 0; i < notes_.size(); ++i) {
    const Tracked& r = sim_->request(i);
    const bool met = r.ok() && !r.outcome->late;
    const bool of = line.of.empty() || r.spec.klass == index || notes_[i].group == index;
    if (!met && of && !notes_[i].withdrawn) last = std::max(last, r.arrival);
  }
  return static_cast<double>(ToMicros(last - from).count());
}

void Runner::Expect(Report& report) const {
  for (const ExpectLine& line : s_.expects) {
    const std::optional<double> value = MetricOf(report, line);
    if (value && (line.at_least ? *value >= line.value : *value <= line.value)) continue;
    report.failures.push_back(StrCat("expected ", line.metric, line.of.empty() ? "" : " of ",
                                     line.of, line.at_least ? " >= " : " <= ", line.value,
                                     ", found ", value.value_or(-1)));
  }
}

Capacity Runner::RunBackToBack(uint32_t at_hand) {
  Capacity capacity;
  testing::ScopedFakeTestPartResultReporter catcher(
      testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures_);
  MakeSimulation(true);
  MakeSessions();
  double total_rate = 0;
  std::vector<double> rates;
  for (const Session& session : sessions_) rates.push_back(total_rate += session.client->rate);
  if (total_rate <= 0) return capacity;
  end_ = kNever;
  size_t done = 0;
  TimePoint warm{};
  while (done < kLearning + kMeasured && failures_.size() == 0) {
    done = 0;
    size_t live = 0;
    const SchedulerStats stats = sim_->scheduler().stats();
    for (const SchedulerStats::Class& c : stats.classes) live += c.queued + c.running;
    done = sim_->requests().size() - live;
    if (warm == TimePoint{} && done >= kLearning) {
      warm = sim_->now();
      class_us_.assign(class_us_.size(), 0);
      begin_ = warm - FromSeconds(s_.warmup);
    }
    for (; live < at_hand; ++live) {
      const double at = random_.Uniform() * total_rate;
      const auto i =
          static_cast<size_t>(std::upper_bound(rates.begin(), rates.end(), at) - rates.begin());
      Session& session = sessions_[std::min(i, sessions_.size() - 1)];
      Spec spec = SpecOf(session);
      spec.deadline.reset();
      Offer(std::move(spec), session.group);
    }
    if (!sim_->Step()) break;
  }
  const double seconds = static_cast<double>(ToMicros(sim_->now() - warm).count()) / 1e6;
  if (seconds <= 0) return capacity;
  const double per_second = static_cast<double>(done - kLearning) / seconds;
  capacity.scale = per_second / total_rate;
  double all = 0;
  for (const double us : class_us_) all += us;
  for (const double us : class_us_) capacity.class_share.push_back(all > 0 ? us / all : 0);
  return capacity;
}

}  // namespace

const Group* Report::Find(const std::string& name) const {
  for (const Group& group : groups) {
    if (group.name == name) return &group;
  }
  return nullptr;
}

std::string Report::Table() const {
  std::string out;
  char line[256];
  std::snprintf(line, sizeof line,
                "  %.0f s simulated in %.2f s (x %.0f), %llu requests, %llu steps, rates x %.3f\n",
                simulated_s, took_s, simulated_s / std::max(took_s, 1e-9),
                static_cast<unsigned long long>(requests), static_cast<unsigned long long>(steps),
                scale);
  StrAppend(&out, static_cast<const char*>(line));
  std::snprintf(line, sizeof line, "  %-12s %7s %8s %8s %8s %8s %7s %8s %10s %10s %10s %6s\n", "",
                "of cap.", "offered", "met", "answered", "refused", "share", "/s", "wait p99",
                "wait max", "lat p99", "overt.");
  StrAppend(&out, static_cast<const char*>(line));
  for (const Group& g : groups) {
    std::snprintf(
        line, sizeof line,
        "  %-12s %6.0f%% %8llu %7.2f%% %7.2f%% %7.2f%% %6.1f%% %8.1f %10.0f %10.0f %10.0f %6u\n",
        g.name.c_str(), 100 * g.of_capacity, static_cast<unsigned long long>(g.offered),
        100 * g.Part(g.met), 100 * g.Part(g.answered), 100 * g.Part(g.refused), 100 * g.share,
        g.per_second, g.wait_p99_us, g.wait_max_us, g.latency_p99_us, g.overtaken);
    StrAppend(&out, static_cast<const char*>(line));
  }
  for (const std::string& failure : failures) StrAppend(&out, "  FAILED: ", failure, "\n");
  return out;
}

Capacity MeasureCapacity(const Scenario& scenario, uint32_t at_hand) {
  return Runner(scenario, {}).RunBackToBack(at_hand);
}

Report RunScenario(const Scenario& scenario, const RunFaults& options) {
  if (scenario.load <= 0) return Runner(scenario, options).RunOpen(1);
  const Capacity capacity = MeasureCapacity(scenario);
  Report report = Runner(scenario, options).RunOpen(scenario.load * capacity.scale);
  for (size_t c = 0; c < capacity.class_share.size(); ++c) {
    report.groups[c].of_capacity = scenario.load * capacity.class_share[c];
  }
  return report;
}

}  // namespace saccade::sim
