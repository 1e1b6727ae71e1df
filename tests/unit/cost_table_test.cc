#include "engine/cost_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/strings.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;

CostModel Trained(int64_t us_per_row) {
  CostModel model;
  for (uint32_t i = 1; i <= 40; ++i) {
    model.Observe({.prefill_rows = i}, Micros(1000 + us_per_row * i));
    model.Observe({.decode_rows = i % 8 + 1}, Micros(900));
  }
  return model;
}

CostTable TwoEntries() {
  CostTable table;
  table.emplace(Digest128{1, 2}, Trained(30));
  table.emplace(Digest128{0xfedcba9876543210, 0x0123456789abcdef}, Trained(300));
  return table;
}

void ExpectEqual(const CostTable& a, const CostTable& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [key, model] : a) {
    const auto other = b.find(key);
    ASSERT_NE(other, b.end());
    EXPECT_EQ(other->second.Save(), model.Save());
  }
}

// A folder of its own for one test.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "saccade-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string Of(const char* file) const { return (path_ / file).string(); }

 private:
  std::filesystem::path path_;
};

TEST(CostTableTest, TextAndBack) {
  for (const CostTable& table : {CostTable(), TwoEntries()}) {
    const std::string text = WriteCostTable(table);
    EXPECT_EQ(text, WriteCostTable(table));
    const absl::StatusOr<CostTable> read = ReadCostTable(text);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectEqual(*read, table);
  }
}

TEST(CostTableTest, EveryDamageIsSeen) {
  const std::string good = WriteCostTable(TwoEntries());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    EXPECT_EQ(ReadCostTable(bad).status().code(), absl::StatusCode::kDataLoss) << "byte " << i;
  }
  for (size_t size = 0; size < good.size(); size += 7) {
    EXPECT_FALSE(ReadCostTable(std::string_view(good).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(ReadCostTable(good + "\n").ok());
  EXPECT_FALSE(ReadCostTable(std::string(kMaxCostBytes + 1, ' ')).ok());
  std::string other_version = good;
  other_version[good.find('1')] = '2';
  EXPECT_THAT(std::string(ReadCostTable(other_version).status().message()),
              HasSubstr("another version"));
}

TEST(CostTableTest, AFileIsReplacedWhole) {
  const Folder folder;
  const std::string path = folder.Of("costs");
  EXPECT_EQ(LoadCostFile(path).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(SaveCostFile(path, CostTable()).ok());
  ASSERT_TRUE(SaveCostFile(path, TwoEntries()).ok());
  const absl::StatusOr<CostTable> read = LoadCostFile(path);
  ASSERT_TRUE(read.ok()) << read.status();
  ExpectEqual(*read, TwoEntries());
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
}

TEST(CostTableTest, FilesThatCannotBeReadOrWrittenAreNamed) {
  const Folder folder;
  const std::string path = folder.Of("costs");
  std::ofstream(path) << "saccade-costs 1 what is this";
  EXPECT_THAT(std::string(LoadCostFile(path).status().message()), HasSubstr(path));
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);  // must not wait for a writer
  EXPECT_EQ(LoadCostFile(path).status().code(), absl::StatusCode::kDataLoss);
  const std::string nowhere = folder.Of("none") + "/costs";
  EXPECT_THAT(std::string(SaveCostFile(nowhere, {}).message()), HasSubstr(nowhere));
  // A full disk: the old file stays, and nothing is left behind.
  const std::string full = folder.Of("full");
  ASSERT_TRUE(SaveCostFile(full, TwoEntries()).ok());
  std::filesystem::create_symlink("/dev/full", full + ".new");
  EXPECT_FALSE(SaveCostFile(full, {}).ok());
  const absl::StatusOr<CostTable> read = LoadCostFile(full);
  ASSERT_TRUE(read.ok()) << read.status();
  ExpectEqual(*read, TwoEntries());
}

}  // namespace
}  // namespace saccade
