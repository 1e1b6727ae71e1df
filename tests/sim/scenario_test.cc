// Runs every file of scenarios/ and prints what came out. SACCADE_SCENARIO=FILE runs that one only.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "tests/sim/run.h"

namespace saccade::sim {
namespace {

std::vector<std::string> Files() {
  const char* const one = std::getenv("SACCADE_SCENARIO");
  if (one != nullptr) return {one};
  std::vector<std::string> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(SACCADE_SOURCE_DIR "/tests/sim/scenarios")) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(Scenarios, WhatTheyExpectHolds) {
  const std::vector<std::string> files = Files();
  ASSERT_FALSE(files.empty());
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    const absl::StatusOr<Scenario> scenario = ReadScenario(file);
    ASSERT_TRUE(scenario.ok()) << scenario.status();
    EXPECT_FALSE(scenario->expects.empty()) << "it expects nothing";
    const Report report = RunScenario(*scenario);
    std::cout << scenario->name << "\n" << report.Table();
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  }
}

}  // namespace
}  // namespace saccade::sim
