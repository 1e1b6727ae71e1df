#include "tests/sim/shrink.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim.h"

namespace saccade::sim {
namespace {

class Shrinker {
 public:
  Shrinker(Scenario scenario, const std::function<bool(const Scenario&)>& fails, int max_runs)
      : s_(std::move(scenario)), fails_(fails), left_(max_runs) {}

  Scenario Run() {
    for (bool smaller = true; smaller && left_ > 0;) {
      smaller = false;
      smaller |= Drop(&Scenario::clients);
      smaller |= Drop(&Scenario::events);
      smaller |= Drop(&Scenario::changes);
      smaller |= Drop(&Scenario::expects);
      smaller |= Drop(&Scenario::gone);
      smaller |= Drop(&Scenario::arrivals);
      smaller |= Drop(&Scenario::steps);
      smaller |= Drop(&Scenario::lanes);
      smaller |= Drop(&Scenario::classes);
      smaller |= Number(&Scenario::seconds, 0.05);
      smaller |= Number(&Scenario::warmup, 0.0);
      for (size_t i = 0; i < s_.clients.size(); ++i) smaller |= Client(i);
      for (size_t i = 0; i < s_.costs.size(); ++i) {
        smaller |= Set(
            s_.costs[i].noise, 0.0, [i](Scenario & s) -> auto& { return s.costs[i].noise; });
        smaller |= Set(
            s_.costs[i].hiccup, 0.0, [i](Scenario & s) -> auto& { return s.costs[i].hiccup; });
      }
      smaller |= Set(
          s_.scheduler.depth, 1u, [](Scenario & s) -> auto& { return s.scheduler.depth; });
    }
    return s_;
  }

 private:
  // Keeps `smaller` when it is a scenario and still fails.
  bool Try(Scenario smaller) {
    if (left_ <= 0) return false;
    // What refers to a part that was taken out is no scenario.
    if (!ParseScenario(PrintScenario(smaller)).ok()) return false;
    --left_;
    if (!fails_(smaller)) return false;
    s_ = std::move(smaller);
    return true;
  }

  // Takes out halves, then quarters, down to single lines.
  template <class Line>
  bool Drop(std::vector<Line> Scenario::*lines) {
    bool any = false;
    for (size_t chunk = (s_.*lines).size(); chunk > 0; chunk /= 2) {
      for (size_t begin = 0; begin < (s_.*lines).size();) {
        Scenario smaller = s_;
        auto& list = smaller.*lines;
        const size_t end = std::min(begin + chunk, list.size());
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(begin),
                   list.begin() + static_cast<std::ptrdiff_t>(end));
        if (Try(std::move(smaller))) {
          any = true;
        } else {
          begin += chunk;
        }
      }
    }
    return any;
  }

  template <class T, class Place>
  bool Set(T now, T to, Place place) {
    if (now == to) return false;
    Scenario smaller = s_;
    place(smaller) = to;
    return Try(std::move(smaller));
  }
  // Towards `least`: all the way, or half of it, as often as it goes.
  template <class T, class Place>
  bool Lower(T least, Place place) {
    bool any = false;
    while (place(s_) > least) {
      const T now = place(s_);
      if (Set(now, least, place)) return true;
      const T half = static_cast<T>(least + (now - least) / 2);
      if (half >= now || half <= least || !Set(now, half, place)) break;
      any = true;
    }
    return any;
  }
  bool Number(double Scenario::*field, double least) {
    if (s_.*field < least * 2 + 1e-3) return false;
    return Lower(
        least, [field](Scenario & s) -> auto& { return s.*field; });
  }

  bool Client(size_t i) {
    bool any = false;
    const auto lower = [&](auto member, auto least) {
      any |= Lower(
          least, [ i, member ](Scenario & s) -> auto& { return s.clients[i].*member; });
    };
    lower(&ClientLine::count, 1u);
    lower(&ClientLine::samples, 1u);
    lower(&ClientLine::cameras, 0u);
    lower(&ClientLine::action_tokens, 1u);
    lower(&ClientLine::text, 1u);
    lower(&ClientLine::arrival, 0u);
    lower(&ClientLine::burst, 1u);
    lower(&ClientLine::new_texts, 0u);
    for (const auto member :
         {&ClientLine::jitter, &ClientLine::repeat, &ClientLine::cancel, &ClientLine::end_session,
          &ClientLine::non_finite, &ClientLine::temperature, &ClientLine::start, &ClientLine::stop,
          &ClientLine::announce}) {
      any |= Set(
          s_.clients[i].*member, 0.0,
          [ i, member ](Scenario & s) -> auto& { return s.clients[i].*member; });
    }
    return any;
  }

  Scenario s_;
  const std::function<bool(const Scenario&)>& fails_;
  int left_;
};

}  // namespace

Scenario Shrink(Scenario scenario, const std::function<bool(const Scenario&)>& fails,
                int max_runs) {
  return Shrinker(std::move(scenario), fails, max_runs).Run();
}

Scenario RandomScenario(uint64_t seed) {
  Random random(Mix(seed, 0x7ce4a110));
  const auto between = [&](uint32_t least, uint32_t most) {
    return least + random.Below(most - least + 1);
  };
  Scenario s;
  s.name = absl::StrCat("random_", seed);
  s.seed = seed;
  s.seconds = 1 + 2 * random.Uniform();
  s.warmup = 0;
  s.scheduler.ceiling_us = random.Chance(0.2) ? 0 : between(1'500, 15'000);
  s.scheduler.depth = random.Chance(0.2) ? 1 : 2;
  s.scheduler.min_chunk = between(1, 32);
  s.scheduler.max_wait_us = random.Below(300'000);
  s.scheduler.ageing_share = 0.02 + 0.5 * random.Uniform();
  const uint32_t classes = between(1, 4);
  for (uint32_t c = 0; c < classes; ++c) {
    ClassLine line;
    line.name = absl::StrCat("class", c);
    line.tier = c == 0 ? 0 : random.Below(3);
    line.deadline_us = random.Chance(0.6) ? between(10'000, 200'000) : 0;
    line.on_late = random.Below(2);
    line.max_queued = between(4, 64);
    line.shares = between(1, 8);
    line.preferred = random.Below(3);
    s.classes.push_back(line);
  }
  const uint32_t workers = between(1, 2);
  const uint32_t models = between(1, 2);
  for (uint32_t w = 0; w < workers; ++w) {
    for (uint32_t m = 0; m < models; ++m) {
      LaneLine lane;
      lane.worker = w;
      lane.model = m;
      lane.blocks = between(60, random.Chance(0.5) ? 100 : 500);
      lane.embeddings = between(4, 24);
      lane.slots = between(4, 32);
      lane.rows = between(24, 500);
      lane.frames = between(1, 6);
      lane.logits = between(4, 32);
      lane.action_tokens = 40;
      lane.headroom = random.Chance(0.5) ? random.Below(lane.blocks / 2) : 0;
      s.lanes.push_back(lane);
    }
  }
  for (uint32_t m = 0; m < models; ++m) {
    CostsLine costs;
    costs.model = m;
    costs.vision_base = random.Below(500);
    costs.frame = between(500, 4'000);
    costs.trunk_base = between(50, 1'500);
    costs.prefill_row = between(2, 60);
    costs.decode_row = between(10, 100);
    costs.noise = random.Chance(0.5) ? 0 : 0.3 * random.Uniform();
    costs.hiccup = random.Chance(0.2) ? 0.01 : 0;
    costs.hiccup_us = 20'000;
    s.costs.push_back(costs);
  }
  const uint32_t clients = between(1, 5);
  for (uint32_t c = 0; c < clients; ++c) {
    ClientLine line;
    line.name = absl::StrCat("client", c);
    line.klass = s.classes[random.Below(classes)].name;
    line.model = random.Below(models);
    line.count = between(1, 6);
    line.rate = 0.5 + 20 * random.Uniform() * random.Uniform();
    line.arrival = random.Below(3);
    line.jitter = random.Uniform();
    line.burst = between(2, 15);
    line.cameras = random.Below(4);
    line.vision_tokens = between(10, 60);
    line.repeat = random.Chance(0.5) ? random.Uniform() : 0;
    line.text = between(1, random.Chance(0.1) ? 300 : 60);
    line.new_texts = random.Below(2);
    line.shared_text = random.Below(2);
    line.action_tokens = between(1, random.Chance(0.2) ? 40 : 9);
    line.samples = random.Chance(0.2) ? between(2, 3) : 1;
    line.temperature = random.Chance(0.3) ? 0.7 : 0;
    line.cancel = random.Chance(0.3) ? 0.1 : 0;
    line.end_session = random.Chance(0.2) ? 0.05 : 0;
    line.cancel_us = between(100, 60'000);
    line.non_finite = random.Chance(0.2) ? 0.03 : 0;
    line.announce = random.Chance(0.3) ? 1 - 0.5 * random.Uniform() : 0;
    s.clients.push_back(line);
  }
  for (uint32_t e = random.Below(4); e > 0; --e) {
    EventLine event;
    event.at = s.seconds * random.Uniform();
    event.kind = random.Below(4);
    if (event.kind == 1 && workers == 1) event.kind = 0;
    event.worker = random.Below(workers);
    event.us = between(1'000, 200'000);
    s.events.push_back(event);
  }
  if (random.Chance(0.3)) {
    CostChange change;
    change.at = s.seconds / 2;
    change.over = random.Chance(0.5) ? 0 : 0.5;
    change.costs = s.costs[0];
    change.costs.frame *= 3;
    change.costs.trunk_base *= 2;
    s.changes.push_back(change);
  }
  ExpectLine gap;
  gap.metric = "gap_us";
  gap.at_least = false;
  gap.value = 1e6;
  s.expects.push_back(gap);
  return s;
}

}  // namespace saccade::sim
