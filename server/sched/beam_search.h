#pragma once
// BeamSearch: which hypotheses of one request go on, and which are the answer. Pure; knows nothing
// of blocks, steps or time. The definition is that of transformers 4.40 (generation/beam_search.py:
// BeamSearchScorer, BeamHypotheses), with its ties decided: by score, then by beam, then by the
// order of a beam's candidates.
//
// A step takes the candidates of every live beam and adds each one's log-probability to its beam's.
// Going down the sorted list until `beams` of them live on: a stop token among the first `beams` of
// the list completes a hypothesis, further down it is dropped; any other token is a live beam of
// the next step. Of complete hypotheses the `beams` best by score are kept, where
//   score = sum of log-probabilities / (tokens, the stop token counted) ^ length_penalty.
// The search is over when `beams` hypotheses are complete and either early_stopping is set or the
// best candidate of this step, scored at the present length, is not above the worst of them; when
// no beam lives; or at the token limit, where live beams become hypotheses as they are.
#include <cstdint>
#include <span>
#include <vector>

namespace saccade {

struct BeamOptions {
  float length_penalty = 1;
  bool early_stopping = false;
  uint32_t results = 1;  // best hypotheses that are the answer; at most the number of beams
};

struct ScoredToken {
  int32_t token = 0;
  float log_prob = 0;
};

class BeamSearch {
 public:
  struct Hypothesis {
    std::vector<int32_t> tokens;  // with the stop token
    double log_prob = 0;          // sum over its tokens
    double score = 0;
    bool stopped = false;  // by a stop token, else by the limit
  };
  // Beam i of the next step continues beam `parent` of this one with `token`.
  struct Next {
    uint32_t parent = 0;
    int32_t token = 0;
  };

  // All counts are at least 1.
  BeamSearch(uint32_t beams, const BeamOptions& options, std::span<const int32_t> stop_tokens,
             uint32_t max_tokens);
  // Candidates of one beam that a step needs: enough that stop tokens leave one for every beam.
  uint32_t candidates() const;
  static uint32_t Candidates(uint32_t beams, size_t stop_tokens);

  uint32_t live() const { return static_cast<uint32_t>(live_.size()); }  // 1 before the first step
  bool over() const { return over_; }
  // `tops[i]`: the candidates of live beam i, most likely first; none is empty. What goes on;
  // empty when the search is over.
  std::vector<Next> Advance(std::span<const std::vector<ScoredToken>> tops);
  // Best first, of equal scores the one that was complete first; at most options.results.
  std::vector<Hypothesis> Results() const;

 private:
  struct Beam {
    std::vector<int32_t> tokens;
    double log_prob = 0;
  };
  double Score(double log_prob, size_t tokens) const;
  bool IsStop(int32_t token) const;
  void Complete(const Beam& beam, bool stopped);

  uint32_t beams_;
  BeamOptions options_;
  std::vector<int32_t> stop_tokens_;
  uint32_t max_tokens_;
  std::vector<Beam> live_;
  std::vector<Hypothesis> complete_;  // best first; at most beams_
  bool over_ = false;
};

}  // namespace saccade
