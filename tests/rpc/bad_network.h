#pragma once
// BadNetwork: a TCP relay between a client and a server on loopback that can reset a connection
// after a number of bytes, or fall silent as a cable that was pulled does.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <thread>

namespace saccade::testing {

// One connection, from Start of the first client on. Its address takes no second one.
class BadNetwork {
 public:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  // Resets both sides once that many bytes went up (from the client) or down.
  explicit BadNetwork(int server_port, size_t cut_up = kNever, size_t cut_down = kNever)
      : server_port_(server_port), cut_{cut_up, cut_down} {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = Loopback(0);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_, 1), 0);
    socklen_t size = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Relay(); });
  }
  ~BadNetwork() {
    stop_ = true;
    thread_.join();
  }
  BadNetwork(const BadNetwork&) = delete;
  BadNetwork& operator=(const BadNetwork&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // From now on nothing passes, and nobody is told.
  void FallSilent() { silent_ = true; }
  // From now on: both sides are reset.
  void Reset() { reset_ = true; }
  // Whether the server has closed its side.
  bool server_gone() const { return server_gone_; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  static void CloseWithReset(int fd) {
    const linger at_once = {1, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    ::close(fd);
  }
  bool Stopped() const { return stop_ || reset_; }

  void Relay() {
    while (!Stopped()) {
      pollfd wait = {listener_, POLLIN, 0};
      if (::poll(&wait, 1, 5) > 0) break;
    }
    if (Stopped()) {
      ::close(listener_);
      return;
    }
    const int client = ::accept(listener_, nullptr, nullptr);
    ::close(listener_);
    const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(server_port_);
    EXPECT_EQ(::connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    Pump({client, server});
    CloseWithReset(client);
    CloseWithReset(server);
  }

  // Until either side closes, a cut is reached, or the test says so.
  void Pump(const std::array<int, 2>& ends) {
    std::array<size_t, 2> left = cut_;
    std::array<char, 16'384> bytes{};
    while (!Stopped()) {
      std::array<pollfd, 2> wait = {pollfd{ends[0], POLLIN, 0}, pollfd{ends[1], POLLIN, 0}};
      // Silent: what the server sends is taken off its hands no more, its own end is seen.
      if (::poll(wait.data(), 2, 2) <= 0) continue;
      for (size_t from = 0; from < 2; ++from) {
        if (wait[from].revents == 0) continue;
        if (silent_ && from == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          continue;
        }
        const ssize_t got = ::recv(ends[from], bytes.data(), std::min(bytes.size(), left[from]), 0);
        if (got <= 0) {
          server_gone_ = server_gone_ || from == 1;
          return;
        }
        if (silent_) continue;  // what the server says is lost on the way
        size_t sent = 0;
        while (sent < static_cast<size_t>(got) && !Stopped()) {
          const ssize_t n = ::send(ends[1 - from], bytes.data() + sent,
                                   static_cast<size_t>(got) - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
          if (n > 0) {
            sent += static_cast<size_t>(n);
          } else if (errno == EAGAIN) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          } else {
            return;
          }
        }
        if (left[from] != kNever) left[from] -= static_cast<size_t>(got);
        if (left[from] == 0) return;
      }
    }
  }

  const int server_port_;
  const std::array<size_t, 2> cut_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> silent_{false};
  std::atomic<bool> reset_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> server_gone_{false};
  std::thread thread_;
};

}  // namespace saccade::testing
