// No memory for one large allocation of a request (a message, pixels, a resized frame): whichever
// it is, that message or request is an error, and everything else goes on. Small allocations are
// not made to fail: they come from the heap's own reserve, and nobody survives without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace {

constexpr size_t kLarge = 40'000;  // bytes
// Large allocations until one fails; below zero: none does.
std::atomic<int> g_countdown{-1};
std::atomic<int> g_failed{0};
// Threads of the clients, which share this process, are spared.
thread_local bool t_spared = false;

void* Allocate(size_t size, size_t alignment) {
  if (size >= kLarge && !t_spared && g_countdown.load() >= 0 && g_countdown.fetch_sub(1) == 0) {
    ++g_failed;
    throw std::bad_alloc();
  }
  void* const memory =
      alignment == 0
          ? std::malloc(size)
          : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return Allocate(size, 0); }
void* operator new[](size_t size) { return Allocate(size, 0); }
void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace saccade::testing {
namespace {

// What comes back for a frame and an act request: the tokens, or nothing when either was refused.
std::optional<std::vector<int32_t>> Ask(SessionClient& client, const v1::VisionFrame& frame,
                                        uint64_t id) {
  client.SendFrame(frame);
  client.SendAct(id);
  for (;;) {
    const std::optional<v1::SessionResponse> response = client.Next();
    if (!response) {
      ADD_FAILURE() << "the stream ended: " << client.Finish().error_message();
      return std::nullopt;
    }
    if (response->has_chunk()) return TokensOf(response->chunk());
    EXPECT_TRUE(response->has_error()) << response->ShortDebugString();
    EXPECT_EQ(response->error().code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED))
        << response->ShortDebugString();
    if (response->error().act_id() == id) return std::nullopt;
  }
}

TEST(MemoryFaultTest, NoMemoryForAFrameFailsThatFrameOnly) {
  t_spared = true;
  TestServer server;
  SessionClient witness(NewChannel(server.address()));
  witness.Open();
  SessionClient client(NewChannel(server.address()));
  v1::Open open;
  open.set_instruction("large");
  client.Open(open);
  const v1::VisionFrame small = RawFrame("front", 5);
  const v1::VisionFrame large = RawFrame("front", 100, 0, 640, 480);
  const std::vector<int32_t> expected = *Ask(client, large, 1);
  const std::vector<int32_t> of_small = *Ask(client, small, 2);
  uint64_t id = 3;
  int failed = 0;
  for (int n = 0;; ++n) {
    ASSERT_LT(n, 100);
    const int before = g_failed;
    g_countdown = n;
    const auto tokens = Ask(client, large, id++);
    g_countdown = -1;
    if (g_failed == before) {
      EXPECT_EQ(tokens, expected);
      break;
    }
    ++failed;
    // Without the large frame the answer, if any, is that of the one before.
    if (tokens) {
      EXPECT_TRUE(*tokens == expected || *tokens == of_small) << n;
    }
    EXPECT_EQ(Ask(client, small, id++), of_small) << n;
  }
  EXPECT_GT(failed, 0);
  client.Cancel();
  client.Finish();
  witness.Cancel();
  witness.Finish();
  server.ExpectIdleSoon();
}

}  // namespace
}  // namespace saccade::testing
