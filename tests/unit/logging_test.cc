#include "base/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/strings.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr std::string_view kTime = "2026-01-31T12:00:00.000Z";

std::string Json(std::string_view message, std::initializer_list<LogField> fields = {}) {
  return FormatLogRecord(LogFormat::kJson, kTime, LogLevel::kInfo, message, fields);
}

TEST(LoggingTest, TextRecordsCarryTheirFields) {
  EXPECT_EQ(FormatLogRecord(LogFormat::kText, kTime, LogLevel::kWarn, "late",
                            {LogField(RequestId(17)),
                             LogField(SessionId(3)),
                             {"class", "control"},
                             {"predicted_ms", 21.5},
                             {"on_time", false},
                             {"rows", size_t{316}}}),
            "2026-01-31T12:00:00.000Z warn  late request=17 session=3 class=\"control\" "
            "predicted_ms=21.5 on_time=false rows=316");
}

TEST(LoggingTest, JsonRecordsCarryTheirFields) {
  EXPECT_EQ(
      Json("ok",
           {LogField(RequestId(17)), {"class", std::string("control")}, {"x", -2}, {"y", 1e-7}}),
      R"({"time":"2026-01-31T12:00:00.000Z","level":"info","message":"ok",)"
      R"("request":17,"class":"control","x":-2,"y":1e-07})");
  EXPECT_EQ(Json("", {{"big", uint64_t{18446744073709551615u}},
                      {"nan", std::nan("")},
                      {"inf", -std::numeric_limits<double>::infinity()}}),
            R"({"time":"2026-01-31T12:00:00.000Z","level":"info","message":"",)"
            R"("big":18446744073709551615,"nan":"nan","inf":"-inf"})");
}

// What a client sends must neither forge a line nor break the JSON.
TEST(LoggingTest, EverythingOutsideIsEscaped) {
  EXPECT_THAT(Json("a\"b\\c\nd\re\tf\x01\x7f"),
              HasSubstr(R"("message":"a\"b\\c\nd\u000de\u0009f\u0001\u007f")"));
  EXPECT_THAT(Json(std::string_view("nul\0nul", 7)), HasSubstr(R"(nul\u0000nul)"));
  EXPECT_THAT(Json("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\xa4\x96"),
              HasSubstr("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\xa4\x96"));
  // Not UTF-8: stray, overlong, surrogate, too large, cut off.
  EXPECT_THAT(Json("\xff"), HasSubstr("\"message\":\"\xef\xbf\xbd\""));
  for (const char* bad : {"\x80", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                          "\xe2\x82", "\xf0\x9f\xa4"}) {
    const std::string record = Json(bad);
    EXPECT_THAT(record, HasSubstr("\xef\xbf\xbd")) << record;
  }
  const std::string text =
      FormatLogRecord(LogFormat::kText, kTime, LogLevel::kInfo, "one\ntwo", {{"k", "\n\" k2=\"x"}});
  EXPECT_EQ(text, "2026-01-31T12:00:00.000Z info  one\\ntwo k=\"\\n\\\" k2=\\\"x\"");
}

TEST(LoggingTest, WritesLinesToStandardErrorAtTheConfiguredLevel) {
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(InitLogging({LogLevel::kWarn, LogFormat::kText}).ok());
  EXPECT_FALSE(LogEnabled(LogLevel::kInfo));
  EXPECT_TRUE(LogEnabled(LogLevel::kError));
  LogInfo("not written");
  LogWarn("written", {LogField(RequestId(5))});
  spdlog::error("from a library\nwith two lines");
  const std::string out = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      out,
      MatchesRegex(
          "[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+[.][0-9][0-9][0-9]Z warn  written request=5\n"
          "[^\n]*Z error from a library.nwith two lines\n"));
}

TEST(LoggingTest, RecordsOfManyThreadsStayWhole) {
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(InitLogging({LogLevel::kInfo, LogFormat::kJson}).ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i)
        LogInfo("tick", {{"thread", t}, {"i", i}, {"pad", std::string(100, 'x')}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::istringstream out(::testing::internal::GetCapturedStderr());
  int lines = 0;
  for (std::string line; std::getline(out, line); ++lines) {
    ASSERT_TRUE(line.starts_with("{\"time\":") && line.ends_with("xxx\"}")) << line;
  }
  EXPECT_EQ(lines, 800);
}

}  // namespace
}  // namespace saccade
