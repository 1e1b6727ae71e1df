// Beam search against a second implementation that follows the reference's own steps on whole
// matrices of scores, and against trying every sequence of a tiny vocabulary.
#include "sched/beam_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace saccade {
namespace {

using Tokens = std::vector<int32_t>;
// Log-probabilities of the whole vocabulary after some tokens.
using LanguageModel = std::function<std::vector<float>(const Tokens&)>;

// Rows of a random table, chosen by a hash of the tokens so far.
LanguageModel RandomModel(uint32_t seed, size_t vocabulary, double sharpness) {
  return [=](const Tokens& tokens) {
    std::seed_seq sequence(tokens.begin(), tokens.end());
    std::vector<uint32_t> words(1);
    sequence.generate(words.begin(), words.end());
    std::mt19937 rng(seed * 7919 + words[0]);
    std::vector<double> logits;
    double total = 0;
    for (size_t i = 0; i < vocabulary; ++i) {
      logits.push_back(sharpness * static_cast<double>(rng() % 1000) / 1000);
      total += std::exp(logits.back());
    }
    std::vector<float> out;
    for (const double logit : logits) out.push_back(static_cast<float>(logit - std::log(total)));
    return out;
  };
}

std::vector<ScoredToken> Top(const std::vector<float>& log_probs, uint32_t count) {
  std::vector<ScoredToken> top;
  for (size_t i = 0; i < log_probs.size(); ++i) {
    top.push_back({static_cast<int32_t>(i), log_probs[i]});
  }
  std::stable_sort(top.begin(), top.end(), [](const ScoredToken& a, const ScoredToken& b) {
    return a.log_prob > b.log_prob;
  });
  top.resize(std::min<size_t>(top.size(), count));
  return top;
}

std::vector<BeamSearch::Hypothesis> Search(const LanguageModel& model, uint32_t beams,
                                           const BeamOptions& options, const Tokens& stops,
                                           uint32_t max_tokens) {
  BeamSearch search(beams, options, stops, max_tokens);
  std::vector<Tokens> live(1);
  for (uint32_t step = 0; !search.over(); ++step) {
    EXPECT_LT(step, max_tokens);
    EXPECT_EQ(search.live(), live.size());
    std::vector<std::vector<ScoredToken>> tops;
    for (const Tokens& tokens : live) tops.push_back(Top(model(tokens), search.candidates()));
    std::vector<Tokens> next;
    for (const BeamSearch::Next& n : search.Advance(tops)) {
      next.push_back(live.at(n.parent));
      next.back().push_back(n.token);
    }
    live = std::move(next);
  }
  return search.Results();
}

// transformers 4.40, BeamSearchScorer and _beam_search, line by line for one prompt: scores of dead
// beams are -1e9, the list is the top of beams x vocabulary.
std::vector<std::pair<double, Tokens>> Reference(const LanguageModel& model, uint32_t beams,
                                                 const BeamOptions& options, const Tokens& stops,
                                                 uint32_t max_tokens) {
  std::vector<std::pair<double, Tokens>> hypotheses;  // in the order they were added
  double worst = 1e9;
  const auto add = [&](const Tokens& tokens, double sum) {
    const double score = sum / std::pow(static_cast<double>(tokens.size()),
                                        static_cast<double>(options.length_penalty));
    if (hypotheses.size() >= beams && score <= worst) return;
    hypotheses.emplace_back(score, tokens);
    if (hypotheses.size() > beams) {
      hypotheses.erase(std::min_element(hypotheses.begin(), hypotheses.end(),
                                        [](auto& a, auto& b) { return a.first < b.first; }));
    }
    worst = std::min_element(hypotheses.begin(), hypotheses.end(), [](auto& a, auto& b) {
              return a.first < b.first;
            })->first;
  };
  std::vector<Tokens> inputs(beams);
  std::vector<double> scores(beams, -1e9);
  scores[0] = 0;
  bool done = false;
  while (!done && inputs[0].size() < max_tokens) {
    struct Entry {
      double score;
      uint32_t beam;
      int32_t token;
    };
    std::vector<Entry> list;
    for (uint32_t b = 0; b < beams; ++b) {
      const std::vector<float> log_probs = model(inputs[b]);
      for (size_t v = 0; v < log_probs.size(); ++v) {
        list.push_back({scores[b] + static_cast<double>(log_probs[v]), b, static_cast<int32_t>(v)});
      }
    }
    std::stable_sort(list.begin(), list.end(),
                     [](const Entry& a, const Entry& b) { return a.score > b.score; });
    const size_t keep = std::max<size_t>(2, 1 + stops.size()) * beams;
    list.resize(std::min(list.size(), keep));
    std::vector<Tokens> next_inputs;
    std::vector<double> next_scores;
    for (size_t rank = 0; rank < list.size() && next_inputs.size() < beams; ++rank) {
      Tokens tokens = inputs[list[rank].beam];
      tokens.push_back(list[rank].token);
      if (std::find(stops.begin(), stops.end(), list[rank].token) != stops.end()) {
        if (rank < beams) add(tokens, list[rank].score);
        continue;
      }
      next_inputs.push_back(tokens);
      next_scores.push_back(list[rank].score);
    }
    const auto length = static_cast<double>(inputs[0].size() + 1);
    if (hypotheses.size() >= beams) {
      done = options.early_stopping ||
             worst >= list[0].score / std::pow(length, static_cast<double>(options.length_penalty));
    }
    inputs = next_inputs;
    scores = next_scores;
  }
  if (!done) {
    for (uint32_t b = 0; b < beams; ++b) add(inputs[b], scores[b]);
  }
  std::stable_sort(hypotheses.begin(), hypotheses.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  hypotheses.resize(options.results);
  return hypotheses;
}

TEST(BeamSearch, EqualsTheReferencesSteps) {
  int stopped = 0;
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937 rng(seed);
    const size_t vocabulary = 40 + rng() % 60;
    const uint32_t beams = 1 + rng() % 6;
    BeamOptions options;
    options.length_penalty = std::vector<float>{0, 0.6F, 1, 2, -1}[rng() % 5];
    options.early_stopping = rng() % 2 == 0;
    options.results = 1 + rng() % beams;
    Tokens stops;
    for (uint32_t i = rng() % 4; i > 0; --i) stops.push_back(static_cast<int32_t>(i * 3));
    const uint32_t max_tokens = 1 + rng() % 12;
    LanguageModel model = RandomModel(seed, vocabulary, 4);
    if (!stops.empty() && seed % 2 == 0) {  // ends are likely
      model = [inner = model, stops](const Tokens& tokens) {
        std::vector<float> out = inner(tokens);
        out[static_cast<size_t>(stops[0])] = -1.5F;
        return out;
      };
    }
    const auto got = Search(model, beams, options, stops, max_tokens);
    const auto want = Reference(model, beams, options, stops, max_tokens);
    ASSERT_EQ(got.size(), want.size()) << seed;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].tokens, want[i].second) << seed;
      EXPECT_DOUBLE_EQ(got[i].score, want[i].first) << seed;
      const bool ends = std::find(stops.begin(), stops.end(), got[i].tokens.back()) != stops.end();
      EXPECT_EQ(got[i].stopped, ends);
      EXPECT_TRUE(ends || got[i].tokens.size() == max_tokens);
      stopped += ends ? 1 : 0;
    }
  }
  EXPECT_GT(stopped, 100);
}

// With a beam for every prefix the search is exhaustive.
TEST(BeamSearch, EqualsTryingEverySequenceOfATinyVocabulary) {
  constexpr size_t kVocabulary = 3;
  constexpr uint32_t kTokens = 4;
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    const LanguageModel model = RandomModel(seed, kVocabulary, 3);
    const Tokens stops = {2};
    std::vector<std::pair<double, Tokens>> all;
    const std::function<void(const Tokens&, double)> extend = [&](const Tokens& tokens,
                                                                  double sum) {
      if (tokens.size() == kTokens || (!tokens.empty() && tokens.back() == stops[0])) {
        all.emplace_back(sum / static_cast<double>(tokens.size()), tokens);
        return;
      }
      const std::vector<float> log_probs = model(tokens);
      for (size_t v = 0; v < kVocabulary; ++v) {
        Tokens next = tokens;
        next.push_back(static_cast<int32_t>(v));
        extend(next, sum + static_cast<double>(log_probs[v]));
      }
    };
    extend({}, 0);
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    BeamOptions options;
    options.results = 5;
    const auto got = Search(model, 81, options, stops, kTokens);
    ASSERT_EQ(got.size(), 5u);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].tokens, all[i].second) << seed;
      EXPECT_DOUBLE_EQ(got[i].score, all[i].first);
    }
  }
}

TEST(BeamSearch, OneBeamIsGreedy) {
  const LanguageModel model = RandomModel(5, 50, 6);
  const auto got = Search(model, 1, {}, {}, 9);
  ASSERT_EQ(got.size(), 1u);
  Tokens greedy;
  while (greedy.size() < 9) greedy.push_back(Top(model(greedy), 1)[0].token);
  EXPECT_EQ(got[0].tokens, greedy);
  EXPECT_FALSE(got[0].stopped);
}

TEST(BeamSearch, TiesGoToTheEarlierBeamAndCandidate) {
  const LanguageModel flat = [](const Tokens&) { return std::vector<float>(8, -2); };
  BeamOptions options;
  options.results = 3;
  const auto got = Search(flat, 3, options, {}, 2);
  ASSERT_EQ(got.size(), 3u);
  EXPECT_EQ(got[0].tokens, (Tokens{0, 0}));
  EXPECT_EQ(got[1].tokens, (Tokens{0, 1}));
  EXPECT_EQ(got[2].tokens, (Tokens{0, 2}));
}

TEST(BeamSearch, StopTokensLeaveACandidateForEveryBeam) {
  EXPECT_EQ(BeamSearch::Candidates(4, 0), 8u);
  EXPECT_EQ(BeamSearch::Candidates(4, 1), 8u);
  EXPECT_EQ(BeamSearch::Candidates(4, 3), 16u);
}

}  // namespace
}  // namespace saccade
