#include "base/cores.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace saccade {
namespace {

namespace fs = std::filesystem;

class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    mount_ = fs::path(testing::TempDir()) /
             ("cores_test." + std::to_string(getpid()) + "." +
              testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(mount_);
    fs::create_directories(mount_);
  }
  void TearDown() override { fs::remove_all(mount_); }

  void Write(const std::string& path, const std::string& text) const {
    fs::create_directories((mount_ / path).parent_path());
    std::ofstream(mount_ / path) << text;
  }

  fs::path mount_;
};

TEST_F(CgroupTest, V2TakesTheSmallestQuotaOnTheWayUp) {
  Write("cpu.max", "max 100000\n");
  Write("pod/cpu.max", "150000 100000\n");
  Write("pod/box/cpu.max", "400000 100000\n");
  EXPECT_EQ(CgroupCpuQuota(mount_, "0::/pod/box\n"), 1.5);
  EXPECT_EQ(CgroupCpuQuota(mount_, "0::/"), std::nullopt);
}

TEST_F(CgroupTest, V2InsideAContainerSeesItsOwnGroupAtTheRoot) {
  Write("cpu.max", "250000 100000\n");
  EXPECT_EQ(CgroupCpuQuota(mount_, "0::/\n"), 2.5);
  EXPECT_EQ(CgroupCpuQuota(mount_, "0::/not/visible\n"), 2.5);
  EXPECT_EQ(CgroupCpuQuota(mount_, "0::/../elsewhere\n"), 2.5);
}

TEST_F(CgroupTest, V1) {
  Write("cpu,cpuacct/box/cpu.cfs_quota_us", "300000\n");
  Write("cpu,cpuacct/box/cpu.cfs_period_us", "100000\n");
  Write("cpu,cpuacct/free/cpu.cfs_quota_us", "-1\n");
  Write("cpu,cpuacct/free/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(CgroupCpuQuota(mount_, "5:memory:/box\n4:cpu,cpuacct:/box\n"), 3.0);
  EXPECT_EQ(CgroupCpuQuota(mount_, "4:cpu,cpuacct:/free\n"), std::nullopt);
  EXPECT_EQ(CgroupCpuQuota(mount_, "4:cpuset:/box\n"), std::nullopt);
}

TEST_F(CgroupTest, NonsenseIsNoLimit) {
  Write("a/cpu.max", "fast 100000");
  Write("b/cpu.max", "100000 0");
  Write("c/cpu.max", "");
  for (const char* text : {"0::/a", "0::/b", "0::/c", "", "\n\n", "0", "0:", "no colon\n::\n"}) {
    EXPECT_EQ(CgroupCpuQuota(mount_, text), std::nullopt) << text;
  }
}

TEST(Cores, UsableCoresRespectsTheAffinityMask) {
  const std::vector<int> allowed = AffinityCpus();
  ASSERT_FALSE(allowed.empty());
  EXPECT_GE(UsableCores(), 1);
  EXPECT_LE(UsableCores(), static_cast<int>(allowed.size()));
}

TEST(Cores, PinRefusesWhatIsNotThere) {
  for (int cpu : {-1, 60000, 1 << 20}) {
    EXPECT_EQ(PinThisThread(cpu).code(), absl::StatusCode::kInvalidArgument) << cpu;
  }
}

// Of this thread in nanoseconds, from sched_getattr(2); 0 where the system does not say.
uint64_t Slice() {
  std::array<uint64_t, 8> attributes{};
  if (syscall(SYS_sched_getattr, 0, attributes.data(), sizeof(attributes), 0) != 0) return 0;
  return attributes[3];
}

TEST(Cores, ShortSlicesAreInheritedAndGivenBack) {
  std::thread([] {
    const uint64_t before = Slice();
    PreferShortSlices();
    if (before == 0 || Slice() == before) GTEST_SKIP() << "the system has one slice for all";
    EXPECT_EQ(Slice(), 100'000U);
    std::thread([] { EXPECT_EQ(Slice(), 100'000U); }).join();
    PreferLongSlices();
    EXPECT_EQ(Slice(), before);
  }).join();
}

}  // namespace
}  // namespace saccade
