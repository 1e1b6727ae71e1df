// Random scenarios in the scenario language; one that fails is made small and printed.
// SACCADE_SIM_SCENARIOS=N runs N of them.
#include "tests/sim/shrink.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/sim/run.h"

namespace saccade::sim {
namespace {

TEST(RandomScenarios, HoldEveryInvariant) {
  const char* const more = std::getenv("SACCADE_SIM_SCENARIOS");
  const uint64_t count =
      std::max<uint64_t>(120, more == nullptr ? 0 : std::strtoull(more, nullptr, 10));
  uint64_t requests = 0;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    const Scenario scenario = RandomScenario(seed);
    const Report report = RunScenario(scenario);
    requests += report.requests;
    if (report.ok()) continue;
    const Scenario small = Shrink(scenario, [](const Scenario& s) { return !RunScenario(s).ok(); });
    FAIL() << "seed " << seed << ": " << report.failures[0] << "\nsmallest that fails:\n"
           << PrintScenario(small) << RunScenario(small).Table();
  }
  EXPECT_GT(requests, 10'000u);
}

// A device that loses a row of a prompt's later chunks answers wrongly: what is left of a big
// scenario is one client whose prompt is read in two steps, or whose second request finds the first
// part of it in the cache.
TEST(Shrinking, FindsTheCoreOfAFault) {
  const RunFaults faults{.lose_rows = true};
  const auto fails = [&](const Scenario& s) { return !RunScenario(s, faults).ok(); };
  uint64_t seed = 1;
  while (!fails(RandomScenario(seed))) ASSERT_LT(++seed, 100u) << "the fault is never seen";
  const Scenario big = RandomScenario(seed);
  const Scenario small = Shrink(big, fails);
  const std::string text = PrintScenario(small);
  RecordProperty("scenario", text);
  EXPECT_TRUE(fails(small));
  EXPECT_TRUE(RunScenario(small).ok()) << "it fails without the fault, too:\n" << text;
  ASSERT_EQ(small.clients.size(), 1u) << text;
  EXPECT_LE(small.clients[0].count, 2u) << text;
  EXPECT_EQ(small.clients[0].samples, 1u) << text;
  EXPECT_TRUE(small.events.empty()) << text;
  EXPECT_TRUE(small.changes.empty()) << text;
  EXPECT_TRUE(small.expects.empty()) << text;
  EXPECT_EQ(small.lanes.size(), 1u) << text;
  EXPECT_EQ(small.classes.size(), 1u) << text;
  EXPECT_LE(small.seconds, big.seconds / 2) << text;
  // What is printed can be saved and replayed.
  const absl::StatusOr<Scenario> again = ParseScenario(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(fails(*again));
  EXPECT_EQ(PrintScenario(*again), text);
}

TEST(Shrinking, KeepsWhatATooStrictExpectationNeeds) {
  const absl::StatusOr<Scenario> scenario = ParseScenario(R"(
seconds 4
class control tier=0 deadline_us=30000
class other tier=1 on_late=run_late
lane blocks=512
costs frame=3000 trunk_base=500 prefill_row=20 decode_row=100 noise=0.1
client calm class=control count=2 rate=3
client wild class=control count=8 rate=60 arrival=poisson
client rest class=other count=3 rate=5 arrival=burst burst=4
at 1 hang worker=0 us=30000 every=0.7
expect met control >= 1
expect gap_us <= 1000000
)");
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  const auto fails = [](const Scenario& s) { return !RunScenario(s).ok(); };
  ASSERT_TRUE(fails(*scenario));
  const Scenario small = Shrink(*scenario, fails, 150);
  EXPECT_TRUE(fails(small));
  EXPECT_EQ(small.clients.size(), 1u) << PrintScenario(small);
  EXPECT_EQ(small.expects.size(), 1u) << PrintScenario(small);
  EXPECT_TRUE(small.events.empty()) << PrintScenario(small);
}

TEST(ScenarioText, PrintsWhatItReads) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const std::string text = PrintScenario(RandomScenario(seed));
    const absl::StatusOr<Scenario> parsed = ParseScenario(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status() << "\n" << text;
    EXPECT_EQ(PrintScenario(*parsed), text);
  }
}

TEST(ScenarioText, SaysWhichLineIsWrong) {
  const std::string good = "class a tier=0\nlane\nclient c class=a\n";
  ASSERT_TRUE(ParseScenario(good).ok()) << ParseScenario(good).status();
  const std::pair<const char*, const char*> cases[] = {
      {"clas b\n", "line 4: unknown word 'clas'"},
      {"client d class=a count=0\n", "line 4: 'count' must be 1 to 512"},
      {"client d class=a count=x\n", "line 4: 'count' is not a whole number"},
      {"client d class=a rate=nan\n", "line 4: 'rate' is not a number"},
      {"client d class=a rate=1 rate=2\n", "line 4: 'rate' is there twice"},
      {"client d class=a speed=1\n", "line 4: unknown key 'speed'"},
      {"client d class=a arrival=never\n", "line 4: 'arrival' cannot be 'never'"},
      {"client ../d class=a\n", "line 4: expected a name"},
      {"client d class=b\n", "clients d name no class"},
      {"client d class=a model=3\n", "clients d name no lane's model"},
      {"client c class=a\n", "two classes or clients have one name"},
      {"expect fame a >= 1\n", "line 4: unknown metric 'fame'"},
      {"expect met b >= 1\n", "nothing of the name 'b'"},
      {"expect met a > 1\n", "line 4: expected: expect METRIC"},
      {"at 1 explode\n", "line 4: nothing of the name 'explode' happens"},
      {"t 5 arrive class=a text=3\nt 4 arrive class=a text=3\n", "line 5: recorded times go back"},
      {"t 5 arrive class=a frames=1,,2 text=3\n", "line 4: 'frames' is not a list"},
      {"t 5 arrive class=a\n", "request 0 is empty"},
      {"seconds 1e9\n", "line 4: expected a number"},
      {"lane\n", "a model is twice on a worker"},
  };
  for (const auto& [line, fault] : cases) {
    const absl::StatusOr<Scenario> parsed = ParseScenario(good + line);
    ASSERT_FALSE(parsed.ok()) << line;
    EXPECT_NE(parsed.status().ToString().find(fault), std::string::npos) << line << parsed.status();
  }
  EXPECT_FALSE(ParseScenario(std::string(size_t{17} << 20, '\n')).ok());
}

}  // namespace
}  // namespace saccade::sim
