#pragma once
// The sampling rules that every backend follows, so that one (seed, draw) picks the same token
// everywhere. Order of a row: larger logits first, of equal ones the lower index. F64 throughout.
//   temperature 0:  the first of the row.
//   temperature t:  w[i] = exp((logit[i] - max) / t), total = sum(w) in index order,
//                   u = UniformDraw(seed, draw).
//     top_p 1:      the smallest i with w[0] + ... + w[i] > u * total, sums taken in index order.
//     top_p p < 1:  of the row in its order, the shortest head whose weights sum to p * total or
//                   more (all of it when rounding leaves none); of that head the first token with
//                   a sum > u * (sum of the head). Both sums are taken in the row's order.
//   log-probability of i: (logit[i] - max) - log(sum(exp(logit - max)) in index order), then F32.
// A row with a NaN or an Inf, an empty row, a temperature that is negative or not finite, and a
// top_p outside (0, 1] give kNoSample.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/common/philox.h"

namespace saccade {

inline constexpr int32_t kNoSample = -1;

// Whether i comes before j in the order of a row.
inline bool LogitBefore(const float* logits, int32_t i, int32_t j) {
  return logits[i] != logits[j] ? logits[i] > logits[j] : i < j;
}

// The first of a row's order; kNoSample for an empty row and for one with a NaN or an Inf.
inline int32_t LargestLogit(const float* logits, int64_t n) {
  if (n <= 0) return kNoSample;
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(logits[i])) return kNoSample;
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<int32_t>(best);
}

// Calls visit(i) for the tokens of a finite row in its order until it returns false.
template <class Visit>
void VisitInOrder(const float* logits, int64_t n, Visit&& visit) {
  const auto after = [logits](int32_t i, int32_t j) { return LogitBefore(logits, j, i); };
  std::vector<int32_t> heap(static_cast<size_t>(n));
  for (size_t i = 0; i < heap.size(); ++i) heap[i] = static_cast<int32_t>(i);
  std::make_heap(heap.begin(), heap.end(), after);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), after);
    if (!visit(heap.back())) return;
    heap.pop_back();
  }
}

inline int32_t SampleRow(const float* logits, int64_t n, float temperature, float top_p,
                         int64_t seed, int32_t draw) {
  if (!std::isfinite(temperature) || temperature < 0 || !(top_p > 0 && top_p <= 1)) {
    return kNoSample;
  }
  const int32_t best = LargestLogit(logits, n);
  if (best == kNoSample || temperature == 0) return best;
  const auto weight = [&](int64_t i) {
    return std::exp((static_cast<double>(logits[i]) - static_cast<double>(logits[best])) /
                    static_cast<double>(temperature));
  };
  const double u =
      UniformDraw(static_cast<uint64_t>(seed), static_cast<uint64_t>(static_cast<uint32_t>(draw)));
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += weight(i);
  double sum = 0;
  if (top_p == 1) {
    const double target = u * total;
    for (int64_t i = 0; i < n; ++i) {
      sum += weight(i);
      if (sum > target) return static_cast<int32_t>(i);
    }
    return best;  // u * total rounded up to total itself
  }
  struct Term {
    int32_t token;
    double sum;  // with all before it
  };
  std::vector<Term> head;
  VisitInOrder(logits, n, [&](int32_t i) {
    sum += weight(i);
    head.push_back({i, sum});
    return sum < static_cast<double>(top_p) * total;
  });
  for (const Term& term : head) {
    if (term.sum > u * sum) return term.token;
  }
  return best;
}

// The first `k` tokens of a row's order and their log-probabilities; kNoSample and 0 past the end
// of the row, and everywhere for a row without an answer.
inline void TopOfRow(const float* logits, int64_t n, int64_t k, int32_t* ids, float* log_probs) {
  std::fill_n(ids, k, kNoSample);
  std::fill_n(log_probs, k, 0.0F);
  const int32_t best = LargestLogit(logits, n);
  if (best == kNoSample || k <= 0) return;
  const auto below = [&](int64_t i) {
    return static_cast<double>(logits[i]) - static_cast<double>(logits[best]);
  };
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += std::exp(below(i));
  const double log_total = std::log(total);
  int64_t found = 0;
  VisitInOrder(logits, n, [&](int32_t i) {
    ids[found] = i;
    log_probs[found] = static_cast<float>(below(i) - log_total);
    return ++found < k;
  });
}

}  // namespace saccade
