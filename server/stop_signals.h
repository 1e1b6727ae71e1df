#pragma once
// SIGTERM and SIGINT as an ordinary blocking call instead of the end of the process. Made before
// anything else and before any thread, so that a signal in the first moments waits as well and
// every thread has them blocked.
#include <pthread.h>

#include <csignal>

namespace saccade {

class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that came; waits for one. Any thread.
  int Wait() const {
    int received = 0;
    sigwait(&set_, &received);
    return received;
  }
  // Back to as it was, for a command that a signal may simply end: also one that came meanwhile.
  void Release() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t set_{};
  sigset_t before_{};
};

}  // namespace saccade
