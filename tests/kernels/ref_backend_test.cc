// What the reference backend promises beyond the op table: it refuses memory that is not its own,
// hides device memory and runs behind its stream in guarded mode, and keeps the first error.
#include "backend/ref/ref_backend.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/kernels/op_harness.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;

absl::StatusOr<std::unique_ptr<Backend>> Guarded(std::chrono::microseconds max_delay = {}) {
  RefOptions options;
  options.guarded = true;
  options.max_delay = max_delay;
  return MakeRefBackend(options);
}

struct GuardedRig {
  explicit GuardedRig(std::chrono::microseconds max_delay = {})
      : backend(Must(Guarded(max_delay))), stream(Must(backend->NewStream())) {}
  std::unique_ptr<Buffer> Device(size_t bytes) {
    return Must(backend->Allocate(bytes, MemKind::kDevice));
  }
  std::unique_ptr<Buffer> Pinned(size_t bytes) {
    return Must(backend->Allocate(bytes, MemKind::kPinned));
  }
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Stream> stream;
};

TEST(RefOptions, NegativeDelayIsRefused) {
  EXPECT_EQ(Guarded(std::chrono::microseconds(-1)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RefGuardedDeathTest, HostCannotReadDeviceMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        const auto backend = Must(Guarded());
        const auto buffer = Must(backend->Allocate(64, MemKind::kDevice));
        const volatile auto* bytes = reinterpret_cast<const volatile uint8_t*>(buffer->data());
        const uint8_t value = bytes[3];
        (void)value;
      },
      "");
}

TEST(RefGuardedDeathTest, HostCannotWriteDeviceMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        const auto backend = Must(Guarded());
        const auto buffer = Must(backend->Allocate(64, MemKind::kDevice));
        reinterpret_cast<volatile uint8_t*>(buffer->data())[3] = 1;
      },
      "");
}

TEST(RefGuarded, PinnedAndHostMemoryIsOrdinary) {
  GuardedRig rig;
  for (MemKind kind : {MemKind::kPinned, MemKind::kHost}) {
    const auto buffer = Must(rig.backend->Allocate(100, kind));
    EXPECT_EQ(buffer->kind(), kind);
    EXPECT_EQ(buffer->size(), 100u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
    buffer->data()[99] = std::byte{7};
    EXPECT_EQ(buffer->data()[99], std::byte{7});
  }
}

TEST(RefGuarded, NewDeviceMemoryIsPoison) {
  GuardedRig rig;
  const auto device = rig.Device(8);
  const auto host = rig.Pinned(8);
  Must(rig.stream->Copy(host->View(kI32, {2}), device->View(kI32, {2})));
  Must(rig.stream->Synchronize());
  EXPECT_EQ(reinterpret_cast<const int32_t*>(host->data())[1], -1);
}

TEST(RefGuarded, WorkRunsAfterTheCallReturns) {
  // Each task waits 0 to 200 ms; a host that waits for no event sees its work unfinished.
  GuardedRig rig(std::chrono::milliseconds(200));
  const auto device = rig.Device(4);
  const auto from = rig.Pinned(4);
  const auto to = rig.Pinned(4);
  auto* source = reinterpret_cast<int32_t*>(from->data());
  auto* target = reinterpret_cast<std::atomic<int32_t>*>(to->data());
  *source = 17;
  target->store(0);
  Must(rig.stream->Copy(device->View(kI32, {1}), from->View(kI32, {1})));
  Must(rig.stream->Copy(to->View(kI32, {1}), device->View(kI32, {1})));
  const auto event = Must(rig.stream->Record());
  EXPECT_FALSE(event->Done());
  Must(event->Wait());
  EXPECT_TRUE(event->Done());
  EXPECT_EQ(target->load(), 17);
}

TEST(RefGuarded, PinnedMemoryIsReadWhenTheWorkRuns) {
#if defined(SACCADE_SANITIZE_THREAD)
  GTEST_SKIP() << "this test makes a data race on purpose";
#endif
  // The mistake of writing a staging buffer again before its copy ran must show.
  GuardedRig rig(std::chrono::milliseconds(100));
  const auto device = rig.Device(4);
  const auto staging = rig.Pinned(4);
  const auto back = rig.Pinned(4);
  auto* value = reinterpret_cast<std::atomic<int32_t>*>(staging->data());
  value->store(1);
  bool seen = false;
  for (int attempt = 0; attempt < 20 && !seen; ++attempt) {  // a delay may happen to be short
    Must(rig.stream->Copy(device->View(kI32, {1}), staging->View(kI32, {1})));
    value->store(2);
    Must(rig.stream->Copy(back->View(kI32, {1}), device->View(kI32, {1})));
    Must(rig.stream->Synchronize());
    seen = *reinterpret_cast<const int32_t*>(back->data()) == 2;
    value->store(1);
  }
  EXPECT_TRUE(seen);
}

TEST(RefGuarded, ArgumentsAreReadAtTheCall) {
  GuardedRig rig(std::chrono::milliseconds(20));
  const auto device = rig.Device(16);
  const auto zeros = rig.Pinned(16);
  const auto host = rig.Pinned(16);
  std::fill_n(zeros->data(), 16, std::byte{0});
  {
    auto weight = Must(rig.backend->PackLinear(
        std::vector<TensorView>{TensorView::Dense(zeros->data(), kF32, MemKind::kHost, {2, 2})},
        kF32));
    LinearArgs args;
    args.weight = weight.get();
    args.x = device->View(kF32, {1, 2});
    args.y = device->View(kF32, {1, 2}, 8);
    Must(rig.stream->Copy(device->View(kF32, {4}), zeros->View(kF32, {4})));
    Must(rig.backend->ops().Linear(*rig.stream, args));
    args = LinearArgs{};  // the op has its own copy
    Must(rig.stream->Synchronize());
  }
  Must(rig.stream->Copy(host->View(kF32, {4}), device->View(kF32, {4})));
  Must(rig.stream->Synchronize());
  EXPECT_EQ(reinterpret_cast<const float*>(host->data())[3], 0.0f);
}

TEST(RefGuarded, TheFirstErrorSticks) {
  GuardedRig rig;
  const auto index = rig.Pinned(8);
  reinterpret_cast<int32_t*>(index->data())[0] = 0;
  reinterpret_cast<int32_t*>(index->data())[1] = 5;
  const auto device = rig.Device(1024);
  const TensorView at = device->View(kI32, {2});
  const TensorView in = device->View(kF32, {3, 4}, 64);
  const TensorView out = device->View(kF32, {2, 4}, 256);
  const auto before = Must(rig.stream->Record());
  Must(rig.stream->Copy(at, index->View(kI32, {2})));
  Must(rig.backend->ops().GatherRows(*rig.stream, in, at, out));  // row 5 of 3
  const auto after = Must(rig.stream->Record());
  EXPECT_TRUE(before->Wait().ok());
  const absl::Status error = after->Wait();
  EXPECT_EQ(error.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(error.message()).find("index[1] = 5"), std::string::npos) << error;
  EXPECT_EQ(rig.stream->Synchronize(), error);
  EXPECT_EQ(rig.stream->Copy(at, index->View(kI32, {2})), error);
  const auto later = Must(rig.stream->Record());  // an event always completes
  EXPECT_EQ(later->Wait(), error);
  // Another stream is not concerned.
  const auto other = Must(rig.backend->NewStream());
  EXPECT_TRUE(other->Synchronize().ok());
}

TEST(RefGuarded, FreeingABufferBeforeItsWorkIsAnError) {
  bool seen = false;
  for (int attempt = 0; attempt < 20 && !seen; ++attempt) {
    GuardedRig rig(std::chrono::milliseconds(50));
    const auto to = rig.Device(4);
    auto from = rig.Device(4);
    Must(rig.stream->Copy(to->View(kI32, {1}), from->View(kI32, {1})));
    Must(rig.stream->Copy(to->View(kI32, {1}), from->View(kI32, {1})));
    from.reset();
    const absl::Status status = rig.stream->Synchronize();
    seen = status.code() == absl::StatusCode::kFailedPrecondition;
  }
  EXPECT_TRUE(seen);
}

TEST(RefGuarded, DestroyingAStreamFinishesItsWork) {
  GuardedRig rig(std::chrono::milliseconds(10));
  const auto device = rig.Device(4);
  const auto from = rig.Pinned(4);
  const auto to = rig.Pinned(4);
  *reinterpret_cast<int32_t*>(from->data()) = 23;
  *reinterpret_cast<int32_t*>(to->data()) = 0;
  std::unique_ptr<Event> event;
  {
    const auto stream = Must(rig.backend->NewStream());
    Must(stream->Copy(device->View(kI32, {1}), from->View(kI32, {1})));
    Must(stream->Copy(to->View(kI32, {1}), device->View(kI32, {1})));
    event = Must(stream->Record());
  }
  EXPECT_TRUE(event->Done());
  EXPECT_TRUE(event->Wait().ok());
  EXPECT_EQ(*reinterpret_cast<const int32_t*>(to->data()), 23);
}

TEST(RefGuarded, ManyTasksAreBoundedAndInOrder) {
  GuardedRig rig;
  constexpr int32_t kTasks = 10000;  // more than the queue holds
  const auto numbers = rig.Pinned(kTasks * 4);
  const auto device = rig.Device(4);
  const auto to = rig.Pinned(4);
  auto* values = reinterpret_cast<int32_t*>(numbers->data());
  for (int32_t i = 0; i < kTasks; ++i) values[i] = i;
  for (int32_t i = 0; i < kTasks; ++i) {
    Must(rig.stream->Copy(device->View(kI32, {1}),
                          numbers->View(kI32, {1}, static_cast<size_t>(i) * 4)));
  }
  Must(rig.stream->Copy(to->View(kI32, {1}), device->View(kI32, {1})));
  Must(rig.stream->Synchronize());
  EXPECT_EQ(*reinterpret_cast<const int32_t*>(to->data()), kTasks - 1);
}

class RefMemoryTest : public testing::TestWithParam<bool> {};

TEST_P(RefMemoryTest, RefusesViewsOutsideItsBuffers) {
  RefOptions options;
  options.guarded = GetParam();
  const auto backend = Must(MakeRefBackend(options));
  const auto stream = Must(backend->NewStream());
  const auto device = Must(backend->Allocate(64, MemKind::kDevice));
  const auto pinned = Must(backend->Allocate(64, MemKind::kPinned));
  const TensorView good = device->View(kI32, {16});
  const auto refused = [&](TensorView dst) {
    TensorView src = pinned->View(kI32, {16});
    src.dims = dst.dims;
    src.rank = dst.rank;
    if (dst.rank == 2) src.strides = {4, 1};
    return stream->Copy(dst, src).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refused(good));
  EXPECT_TRUE(refused(device->View(kI32, {17})));
  EXPECT_TRUE(refused(device->View(kI32, {16}, 4)));
  EXPECT_TRUE(refused(device->View(kI32, {15}, 2))) << "misaligned";
  TensorView before = good;
  before.data -= 4;
  EXPECT_TRUE(refused(before));
  TensorView mislabelled = good;
  mislabelled.mem = MemKind::kPinned;
  EXPECT_TRUE(refused(mislabelled));
  TensorView negative = device->View(kI32, {4, 4});
  negative.strides = {-4, 1};
  EXPECT_TRUE(refused(negative));
  TensorView wide = device->View(kI32, {4, 4});
  wide.strides = {int64_t{1} << 61, 1};
  EXPECT_TRUE(refused(wide));
  TensorView gaps = device->View(kI32, {4, 4});
  gaps.strides = {4, 2};
  EXPECT_TRUE(refused(gaps)) << "the last stride must be 1";
  const auto other = Must(MakeRefBackend(options));
  const auto foreign = Must(other->Allocate(64, MemKind::kDevice));
  EXPECT_TRUE(refused(foreign->View(kI32, {16})));
  TensorView freed;
  {
    const auto gone = Must(backend->Allocate(64, MemKind::kDevice));
    freed = gone->View(kI32, {16});
  }
  EXPECT_TRUE(refused(freed));
  Must(stream->Synchronize());
}

TEST_P(RefMemoryTest, BadIndicesOnTheDeviceBecomeErrorsOfTheStream) {
  RefOptions options;
  options.guarded = GetParam();
  const auto make_rig = [&] {
    return BackendFactory{"ref", [options](int) { return MakeRefBackend(options); }};
  };
  const KvGeometry geometry{
      .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = 16, .dtype = kF32};
  struct Case {
    const char* name;
    std::vector<int64_t> row_begin, page_begin, pages, page_len;
    int32_t max_pages;
  };
  for (const Case& c : std::vector<Case>{{"block beyond the pool", {0, 1}, {0, 1}, {4}, {1}, 1},
                                         {"negative block", {0, 1}, {0, 1}, {-1}, {1}, 1},
                                         {"page too long", {0, 1}, {0, 1}, {0}, {17}, 1},
                                         {"negative length", {0, 1}, {0, 1}, {0}, {-1}, 1},
                                         {"rows beyond the batch", {0, 2}, {0, 1}, {0}, {1}, 1},
                                         {"pages descend", {0, 1}, {1, 0}, {0}, {1}, 1},
                                         {"max_pages too small", {0, 1}, {0, 1}, {0}, {1}, 0}}) {
    SCOPED_TRACE(c.name);
    const auto backend = Must(make_rig().make(1));
    const auto stream = Must(backend->NewStream());
    const auto kv = Must(backend->NewKvStorage(geometry, 4));
    const auto staging = Must(backend->Allocate(1024, MemKind::kPinned));
    const auto device = Must(backend->Allocate(1024, MemKind::kDevice));
    size_t offset = 0;
    const auto put = [&](const std::vector<int64_t>& values) {
      auto* out = reinterpret_cast<int32_t*>(staging->data() + offset);
      std::transform(values.begin(), values.end(), out,
                     [](int64_t v) { return static_cast<int32_t>(v); });
      const TensorView view = device->View(kI32, {static_cast<int64_t>(values.size())}, offset);
      offset += 64;
      return view;
    };
    PagedAttentionArgs args;
    args.kv = kv.get();
    args.q_heads = 1;
    args.scale = 1;
    args.batch.num_seqs = 1;
    args.batch.num_rows = 1;
    args.batch.num_pages = 1;
    args.batch.max_pages = c.max_pages;
    args.batch.row_begin = put(c.row_begin);
    args.batch.page_begin = put(c.page_begin);
    args.batch.pages = put(c.pages);
    args.batch.page_len = put(c.page_len);
    args.batch.page_pos = put({0});
    args.batch.row_pos = put({0});
    args.batch.row_limit = put({0});
    args.batch.row_slot = put({0});
    args.q = device->View(kF32, {1, 8}, 512);
    args.out = device->View(kF32, {1, 8}, 576);
    Must(stream->Copy(device->View(kI32, {256}), staging->View(kI32, {256})));
    EXPECT_TRUE(backend->ops().PagedAttention(*stream, args).ok());
    EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kInternal);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, RefMemoryTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "guarded" : "plain"; });

}  // namespace
}  // namespace saccade::optest
