#pragma once
// A scenario: who asks for what, what steps really cost, what goes wrong, and what must hold. The
// text form (README.md beside this file) is what the files in scenarios/ are written in, what
// shrinking prints, and what a recorded trace is.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace saccade::sim {

// Every struct lists its fields once, for the parser and the printer: name, place, least, most. An
// enumeration is a field of words.
struct ClassLine {
  std::string name;
  uint32_t tier = 0;
  uint64_t deadline_us = 0;  // 0: none
  uint32_t on_late = 0;
  uint32_t max_queued = 64;
  uint32_t shares = 1;
  uint32_t preferred = 0;
  template <class F>
  void Fields(F&& f) {
    f.Number("tier", tier, 0, 8);
    f.Number("deadline_us", deadline_us, 0, 3'600'000'000);
    f.Word("on_late", on_late, {"reject", "run_late"});
    f.Number("max_queued", max_queued, 1, 4096);
    f.Number("shares", shares, 1, 1000);
    f.Word("preferred", preferred, {"action", "vision", "text"});
  }
};

struct SchedulerLine {
  uint64_t ceiling_us = 20'000;  // 0: none
  uint32_t depth = 2;
  uint32_t min_chunk = 16;
  uint64_t max_wait_us = 200'000;
  double ageing_share = 0.1;
  template <class F>
  void Fields(F&& f) {
    f.Number("ceiling_us", ceiling_us, 0, 60'000'000);
    f.Number("depth", depth, 1, 2);
    f.Number("min_chunk", min_chunk, 1, 4096);
    f.Number("max_wait_us", max_wait_us, 0, 3'600'000'000);
    f.Number("ageing_share", ageing_share, 0.001, 1);
  }
};

struct LaneLine {
  uint32_t worker = 0;
  uint32_t model = 0;
  uint32_t blocks = 2048;
  uint32_t block_tokens = 16;
  uint32_t headroom = 0;
  uint32_t embeddings = 64;
  uint32_t slots = 64;
  uint32_t rows = 512;
  uint32_t frames = 8;
  uint32_t logits = 64;
  uint32_t action_tokens = 64;
  uint32_t vision_layers = 0;  // alike; 0: cannot be cut
  uint32_t trunk_layers = 0;   // alike, and a head
  double head = 1;             // of the cost of a layer
  template <class F>
  void Fields(F&& f) {
    f.Number("worker", worker, 0, 7);
    f.Number("model", model, 0, 7);
    f.Number("blocks", blocks, 1, 65'536);
    f.Number("block_tokens", block_tokens, 16, 16);  // all prompts are cut alike
    f.Number("headroom", headroom, 0, 65'535);
    f.Number("embeddings", embeddings, 1, 4096);
    f.Number("slots", slots, 1, 1024);
    f.Number("rows", rows, 1, 65'536);
    f.Number("frames", frames, 1, 64);
    f.Number("logits", logits, 1, 1024);
    f.Number("action_tokens", action_tokens, 1, 1024);
    f.Number("vision_layers", vision_layers, 0, 256);
    f.Number("trunk_layers", trunk_layers, 0, 256);
    f.Number("head", head, 0.001, 100);
  }
};

// True costs of a model's steps, microseconds.
struct CostsLine {
  uint32_t model = 0;
  double vision_base = 0;
  double frame = 0;
  double trunk_base = 0;
  double prefill_row = 0;
  double decode_row = 0;
  double slice = 50;  // each slice of a pass, beside its layers
  double noise = 0;   // uniform, +- this part
  double hiccup = 0;  // chance of a step
  double hiccup_us = 0;
  template <class F>
  void Fields(F&& f) {
    f.Number("model", model, 0, 7);
    f.Number("vision_base", vision_base, 0, 1e7);
    f.Number("frame", frame, 0, 1e7);
    f.Number("trunk_base", trunk_base, 0, 1e7);
    f.Number("prefill_row", prefill_row, 0, 1e6);
    f.Number("decode_row", decode_row, 0, 1e6);
    f.Number("slice", slice, 0, 1e6);
    f.Number("noise", noise, 0, 0.99);
    f.Number("hiccup", hiccup, 0, 1);
    f.Number("hiccup_us", hiccup_us, 0, 1e7);
  }
};

// `count` sessions that send alike.
struct ClientLine {
  std::string name;
  std::string klass;
  uint32_t model = 0;
  uint32_t count = 1;
  double rate = 1;  // requests a second, each session
  uint32_t arrival = 0;
  double jitter = 0;    // periodic: late by up to this part of the period
  uint32_t burst = 10;  // burst: as many at once, `rate` on average
  uint32_t cameras = 1;
  uint32_t vision_tokens = 32;
  double repeat = 0;       // chance that a request brings the frames of the one before
  uint32_t text = 20;      // tokens
  uint32_t new_texts = 0;  // 1: every request has a text of its own; 0: the session's
  uint32_t shared_text = 0;
  uint32_t action_tokens = 7;
  uint32_t samples = 1;
  double temperature = 0;
  uint64_t deadline_us = 0;  // 0: the class's
  double start = 0;          // seconds
  double stop = 0;           // 0: the end
  // Chances, of a request: cancelled up to `cancel_us` after it came; the whole session ends then;
  // a token of it is not finite.
  double cancel = 0;
  double end_session = 0;
  uint64_t cancel_us = 10'000;
  double non_finite = 0;
  double announce = 0;  // chance that a request says when the next one is due
  template <class F>
  void Fields(F&& f) {
    f.Text("class", klass);
    f.Number("model", model, 0, 7);
    f.Number("count", count, 1, 512);
    f.Number("rate", rate, 1e-4, 1e5);
    f.Word("arrival", arrival, {"periodic", "poisson", "burst"});
    f.Number("jitter", jitter, 0, 1);
    f.Number("burst", burst, 1, 1000);
    f.Number("cameras", cameras, 0, 16);
    f.Number("vision_tokens", vision_tokens, 1, 4096);
    f.Number("repeat", repeat, 0, 1);
    f.Number("text", text, 0, 16'384);
    f.Number("new_texts", new_texts, 0, 1);
    f.Number("shared_text", shared_text, 0, 1);
    f.Number("action_tokens", action_tokens, 1, 1024);
    f.Number("samples", samples, 1, 16);
    f.Number("temperature", temperature, 0, 10);
    f.Number("deadline_us", deadline_us, 0, 3'600'000'000);
    f.Number("start", start, 0, 86'400);
    f.Number("stop", stop, 0, 86'400);
    f.Number("cancel", cancel, 0, 1);
    f.Number("end_session", end_session, 0, 1);
    f.Number("cancel_us", cancel_us, 0, 60'000'000);
    f.Number("non_finite", non_finite, 0, 1);
    f.Number("announce", announce, 0, 1);
  }
};

// What happens at a second of the scenario.
struct EventLine {
  double at = 0;
  uint32_t kind = 0;
  uint32_t worker = 0;
  uint64_t us = 0;   // how long a worker hangs or the process is suspended
  double every = 0;  // seconds; 0: once
  static constexpr const char* kKinds[] = {"fail_step", "lose_worker", "hang", "suspend"};
  template <class F>
  void Fields(F&& f) {
    f.Number("worker", worker, 0, 7);
    f.Number("us", us, 0, 60'000'000);
    f.Number("every", every, 0, 86'400);
  }
};

// From `at` on steps cost that; reached in a straight line `over` seconds later.
struct CostChange {
  double at = 0;
  double over = 0;
  CostsLine costs;
  template <class F>
  void Fields(F&& f) {
    f.Number("over", over, 0, 86'400);
    costs.Fields(f);
  }
};

// A recorded request. Frames are named by number: equal numbers, equal pixels.
struct ArriveLine {
  uint64_t us = 0;
  uint64_t id = 0;
  std::string klass;
  uint32_t model = 0;
  uint64_t session = 0;
  std::vector<uint64_t> frames;  // one per camera
  uint32_t vision_tokens = 32;
  uint32_t text = 0;
  uint64_t text_id = 0;  // equal numbers, equal texts
  uint32_t action_tokens = 1;
  uint32_t samples = 1;
  uint64_t deadline_us = 0;
  template <class F>
  void Fields(F&& f) {
    f.Number("id", id, 0, 1e15);
    f.Text("class", klass);
    f.Number("model", model, 0, 7);
    f.Number("session", session, 0, 1e15);
    f.Numbers("frames", frames, 16);
    f.Number("vision_tokens", vision_tokens, 1, 4096);
    f.Number("text", text, 0, 16'384);
    f.Number("text_id", text_id, 0, 1e15);
    f.Number("action_tokens", action_tokens, 1, 1024);
    f.Number("samples", samples, 1, 16);
    f.Number("deadline_us", deadline_us, 0, 3'600'000'000);
  }
};

// A recorded end from outside: of a request, or of a session.
struct GoneLine {
  uint64_t us = 0;
  uint64_t id = 0;
  uint64_t session = 0;
  template <class F>
  void Fields(F&& f) {
    f.Number("id", id, 0, 1e15);
    f.Number("session", session, 0, 1e15);
  }
};

// A measured step.
struct StepLine {
  uint64_t us = 0;
  uint32_t worker = 0;
  uint32_t model = 0;
  uint32_t frames = 0;
  uint32_t prefill = 0;
  uint32_t decode = 0;
  uint64_t took_us = 1;
  template <class F>
  void Fields(F&& f) {
    f.Number("worker", worker, 0, 7);
    f.Number("model", model, 0, 7);
    f.Number("frames", frames, 0, 1024);
    f.Number("prefill", prefill, 0, 65'536);
    f.Number("decode", decode, 0, 65'536);
    f.Number("took_us", took_us, 1, 3'600'000'000);
  }
};

// METRIC of a class or of the clients of a name, at least or at most VALUE.
struct ExpectLine {
  std::string metric;
  std::string of;  // empty: of everything
  bool at_least = true;
  double value = 0;
  double after = 0;  // seconds, for recovery_us
};

struct Scenario {
  std::string name = "unnamed";
  uint64_t seed = 1;
  double seconds = 10;
  double warmup = 1;    // seconds that are not judged
  double load = 0;      // of capacity; rates are scaled to it. 0: rates are as written
  bool verify = true;   // compare every answer; false in long scenarios
  uint32_t repeat = 1;  // recorded lines are replayed as often, one after the other
  SchedulerLine scheduler;
  std::vector<ClassLine> classes;
  std::vector<LaneLine> lanes;
  std::vector<CostsLine> costs;
  std::vector<ClientLine> clients;
  std::vector<EventLine> events;
  std::vector<CostChange> changes;
  std::vector<ArriveLine> arrivals;
  std::vector<GoneLine> gone;
  std::vector<StepLine> steps;
  std::vector<ExpectLine> expects;
};

inline constexpr const char* kMetrics[] = {
    "offered",        "met",         "answered",    "refused",     "late",
    "share",          "per_second",  "wait_p99_us", "wait_max_us", "overtaken",
    "latency_p99_us", "recovery_us", "gap_us"};

// INVALID_ARGUMENT names the line and what is wrong with it. Bounded: 16 MiB, 200 000 lines, 512
// sessions at once, 256 of every other kind of line.
absl::StatusOr<Scenario> ParseScenario(std::string_view text);
absl::StatusOr<Scenario> ReadScenario(const std::string& path);
// Text that parses to an equal scenario; fields at their defaults are left out.
std::string PrintScenario(const Scenario& scenario);

}  // namespace saccade::sim
