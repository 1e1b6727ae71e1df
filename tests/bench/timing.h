#pragma once
// Time of short pieces of work, and what many of them amount to.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <utility>
#include <vector>

namespace saccade::bench {

template <class Work>
double Seconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// CPU time of the calling thread: what a call costs one core, without the time that other processes
// took the core away. For work that runs on the calling thread alone.
inline double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
template <class Work>
double CpuSeconds(const Work& work) {
  const double begin = ThreadSeconds();
  work();
  return ThreadSeconds() - begin;
}

// p10 is what an undisturbed call takes; the median is what most take.
struct Summary {
  explicit Summary(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    median = samples[samples.size() / 2];
    p10 = samples[samples.size() / 10];
    best = samples.front();
  }
  double median = 0;
  double p10 = 0;
  double best = 0;
};

}  // namespace saccade::bench
