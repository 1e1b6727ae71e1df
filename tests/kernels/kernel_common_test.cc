// What every backend shares: BF16 rounding, RoPE angles, the random draw, the sampling rule.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "kernels/common/bf16.h"
#include "kernels/common/philox.h"
#include "kernels/common/rope.h"
#include "kernels/common/sampling.h"

namespace saccade {
namespace {

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    const float wide = Bf16ToF32(narrow);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(RoundToBf16(wide)));
      EXPECT_EQ(F32ToBf16(wide), narrow | 0x0040u);
    } else {
      EXPECT_EQ(F32ToBf16(wide), narrow);
    }
  }
}

TEST(Bf16, RoundsToTheNearestAndTiesToEven) {
  for (uint32_t high = 0; high < 0x7f80; high += 7) {  // finite and positive
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = (high << 16) | low;
      float value = 0;
      std::memcpy(&value, &bits, sizeof(value));
      const bool up = low > 0x8000u || (low == 0x8000u && (high & 1u) != 0);
      EXPECT_EQ(F32ToBf16(value), high + (up ? 1 : 0));
      EXPECT_EQ(F32ToBf16(-value), (high + (up ? 1 : 0)) | 0x8000u);
    }
  }
}

TEST(Bf16, ANanWhosePayloadIsInTheLowerHalfStaysANan) {
  const uint32_t bits = 0x7f800001u;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  EXPECT_TRUE(std::isnan(RoundToBf16(value)));
}

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  const auto check = [](uint64_t key, uint64_t low, uint64_t high,
                        std::array<uint32_t, 4> expected) {
    const Philox4x32 block = PhiloxBlock(key, low, high);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(block.word[i], expected[i]) << i;
  };
  check(0, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  check(~0ull, ~0ull, ~0ull, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  check(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull,
        {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST(Philox, DrawsAreUniformAndDiffer) {
  double sum = 0;
  double squares = 0;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = UniformDraw(7, static_cast<uint64_t>(i));
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    squares += u * u;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.01);
  EXPECT_NEAR(squares / kDraws, 1.0 / 3.0, 0.01);
  EXPECT_NE(UniformDraw(1, 0), UniformDraw(2, 0));
  EXPECT_EQ(UniformDraw(1, 5), UniformDraw(1, 5));
}

TEST(Rope, AnglesFollowTheFormula) {
  for (uint32_t dim : {8u, 12u, 64u, 72u, 128u}) {
    for (uint32_t i = 0; i < dim / 2; ++i) {
      const float frequency = RopeInverseFrequency(10000.0, dim, i);
      const double exact = std::pow(10000.0, -2.0 * i / dim);
      EXPECT_NEAR(static_cast<double>(frequency), exact, 4e-7 * exact);
      for (int32_t position : {0, 1, 17, 315, 4095}) {
        const RopeAngle angle = RopeAngleAt(position, frequency);
        EXPECT_NEAR(static_cast<double>(angle.cos), std::cos(position * exact),
                    4e-7 * position + 1e-7);
        EXPECT_NEAR(static_cast<double>(angle.sin), std::sin(position * exact),
                    4e-7 * position + 1e-7);
      }
    }
  }
  EXPECT_EQ(RopeInverseFrequency(10000.0, 64, 0), 1.0f);
  EXPECT_EQ(RopeAngleAt(0, 1.0f).cos, 1.0f);
  // BF16 has no 257: positions and angles must not pass through it.
  EXPECT_NEAR(RopeAngleAt(256, 1.0f).cos, -0.0398, 1e-4);
  EXPECT_NEAR(RopeAngleAt(257, 1.0f).cos, 0.8193, 1e-4);
}

TEST(Sampling, Rule) {
  const std::vector<float> logits = {0.5f, 2.0f, 2.0f, -1.0f};
  EXPECT_EQ(SampleRow(logits.data(), 4, 0.0f, 1.0f, 0, 0), 1);
  EXPECT_EQ(SampleRow(logits.data(), 0, 0.0f, 1.0f, 0, 0), kNoSample);
  EXPECT_EQ(SampleRow(logits.data(), 4, -1.0f, 1.0f, 0, 0), kNoSample);
  EXPECT_EQ(SampleRow(logits.data(), 4, std::numeric_limits<float>::quiet_NaN(), 1.0f, 0, 0),
            kNoSample);
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> row = logits;
    row[3] = bad;
    EXPECT_EQ(SampleRow(row.data(), 4, 0.0f, 1.0f, 0, 0), kNoSample);
    EXPECT_EQ(SampleRow(row.data(), 4, 1.0f, 1.0f, 0, 0), kNoSample);
  }
  // A temperature so small that every weight but the largest vanishes.
  const std::vector<float> one = {1.0f, 3.0f, 2.0f};
  for (int32_t draw = 0; draw < 50; ++draw) {
    EXPECT_EQ(SampleRow(one.data(), 3, std::numeric_limits<float>::denorm_min(), 1.0f, 9, draw), 1);
  }
}

TEST(Sampling, TopPKeepsTheShortestHead) {
  // Weights 4, 2, 2, 1, 1 of 10 at temperature 1; the order is 1, 0, 3, 2, 4.
  const auto log_of = [](double w) { return static_cast<float>(std::log(w)); };
  const std::vector<float> row = {log_of(2), log_of(4), log_of(1), log_of(2), log_of(1)};
  const auto reached = [&](float top_p) {
    std::set<int32_t> tokens;
    for (int32_t draw = 0; draw < 400; ++draw) {
      tokens.insert(SampleRow(row.data(), 5, 1.0f, top_p, 3, draw));
    }
    return tokens;
  };
  EXPECT_EQ(reached(0.05f), (std::set<int32_t>{1}));
  EXPECT_EQ(reached(0.39f), (std::set<int32_t>{1}));
  EXPECT_EQ(reached(0.5f), (std::set<int32_t>{1, 0}));  // of equal ones the lower index
  EXPECT_EQ(reached(0.7f), (std::set<int32_t>{1, 0, 3}));
  EXPECT_EQ(reached(0.85f), (std::set<int32_t>{1, 0, 3, 2}));
  EXPECT_EQ(reached(1.0f), (std::set<int32_t>{0, 1, 2, 3, 4}));
  // By inversion over the head, in its order.
  for (int32_t draw = 0; draw < 100; ++draw) {
    const double u = UniformDraw(3, static_cast<uint64_t>(draw)) * 8;
    EXPECT_EQ(SampleRow(row.data(), 5, 1.0f, 0.7f, 3, draw), u < 4 ? 1 : u < 6 ? 0 : 3);
  }
  for (const float bad : {0.0f, -1.0f, 1.1f, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(SampleRow(row.data(), 5, 1.0f, bad, 0, 0), kNoSample);
  }
}

TEST(Sampling, TopOfRowIsTheLogSoftmaxInOrder) {
  const std::vector<float> row = {0.5f, 2.0f, -3.0f, 2.0f};
  const double total = std::exp(0.5) + 2 * std::exp(2.0) + std::exp(-3.0);
  std::vector<int32_t> ids(6);
  std::vector<float> log_probs(6);
  TopOfRow(row.data(), 4, 6, ids.data(), log_probs.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 3, 0, 2, kNoSample, kNoSample}));
  EXPECT_NEAR(static_cast<double>(log_probs[0]), 2.0 - std::log(total), 1e-6);
  EXPECT_EQ(log_probs[0], log_probs[1]);
  EXPECT_NEAR(static_cast<double>(log_probs[3]), -3.0 - std::log(total), 1e-6);
  EXPECT_EQ(log_probs[4], 0.0f);
  const std::vector<float> bad = {0.5f, std::numeric_limits<float>::infinity()};
  TopOfRow(bad.data(), 2, 2, ids.data(), log_probs.data());
  EXPECT_EQ(ids[0], kNoSample);
  EXPECT_EQ(ids[1], kNoSample);
}

}  // namespace
}  // namespace saccade
