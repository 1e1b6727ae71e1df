#include "sched/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/sim/sim.h"

namespace saccade {
namespace {

using sim::Random;
using sim::TrueCosts;

Micros Took(const TrueCosts& costs, const StepShape& shape, double factor = 1) {
  return Micros(std::llround(costs.Of(shape) * factor));
}

StepShape RandomShape(Random& random) {
  StepShape shape;
  const uint32_t kind = random.Below(4);
  if (kind == 0) shape.frames = 1 + random.Below(4);
  if (kind <= 1) shape.prefill_rows = 16 + random.Below(300);
  if (kind >= 1) shape.decode_rows = 1 + random.Below(32);
  return shape;
}

TEST(CostModel, KnowsNothingPredictsNothing) {
  const CostModel model;
  EXPECT_EQ(model.Predict({1, 300, 8}).p50.count(), 0);
  EXPECT_EQ(model.Predict({1, 300, 8}).p99.count(), 0);
  EXPECT_EQ(model.observations(), 0u);
}

TEST(CostModel, AnEmptyStepTeachesNothing) {
  CostModel model;
  model.Observe({}, Micros(5000));
  EXPECT_EQ(model.observations(), 0u);
  EXPECT_EQ(model.Predict({0, 0, 1}).p50.count(), 0);
}

TEST(CostModel, ConvergesWithinFiftySteps) {
  for (const double noise : {0.0, 0.05, 0.15}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      Random random(seed);
      const TrueCosts costs{800, 2500, 1500, 40, 120, 0};
      CostModel model;
      for (int i = 0; i < 50; ++i) {
        const StepShape shape = RandomShape(random);
        model.Observe(shape, Took(costs, shape, 1 + noise * (2 * random.Uniform() - 1)));
      }
      double error = 0;
      for (int i = 0; i < 200; ++i) {
        const StepShape shape = RandomShape(random);
        const auto p50 = static_cast<double>(model.Predict(shape).p50.count());
        error += std::abs(p50 / costs.Of(shape) - 1) / 200;
        EXPECT_NEAR(p50 / costs.Of(shape), 1, 0.1 + noise) << "seed " << seed;
      }
      EXPECT_LT(error, 0.1) << "seed " << seed << " noise " << noise;
    }
  }
}

TEST(CostModel, P99CoversWhatItShould) {
  Random random(3);
  const TrueCosts costs;
  CostModel model;
  int covered = 0;
  int above_median = 0;
  constexpr int kSteps = 4000;
  for (int i = 0; i < kSteps; ++i) {
    const StepShape shape = RandomShape(random);
    double normal = -6;  // Irwin-Hall
    for (int k = 0; k < 12; ++k) normal += random.Uniform();
    const Micros took = Took(costs, shape, std::exp(0.15 * normal));
    if (i >= 500) {
      covered += took <= model.Predict(shape).p99 ? 1 : 0;
      above_median += took > model.Predict(shape).p50 ? 1 : 0;
    }
    model.Observe(shape, took);
  }
  EXPECT_GE(covered, (kSteps - 500) * 0.975);
  EXPECT_NEAR(above_median, (kSteps - 500) * 0.5, (kSteps - 500) * 0.08);
  // And not by being far too careful: exp(0.15 * 2.33) = 1.42.
  const CostPrediction p = model.Predict({0, 100, 0});
  EXPECT_LT(static_cast<double>(p.p99.count()) / static_cast<double>(p.p50.count()), 1.8);
}

TEST(CostModel, NeverNegativeAndMonotone) {
  Random random(9);
  for (int round = 0; round < 50; ++round) {
    CostModel model;
    for (int i = 0; i < 30; ++i) {
      model.Observe(RandomShape(random), Micros(random.Below(50'000)));  // pure nonsense
    }
    for (int i = 0; i < 50; ++i) {
      const StepShape shape = RandomShape(random);
      const CostPrediction p = model.Predict(shape);
      EXPECT_GE(p.p50.count(), 0);
      EXPECT_GE(p.p99, p.p50);
      for (const StepShape& more :
           {StepShape{shape.frames + 1, shape.prefill_rows, shape.decode_rows},
            StepShape{shape.frames, shape.prefill_rows + 1, shape.decode_rows},
            StepShape{shape.frames, shape.prefill_rows, shape.decode_rows + 1}}) {
        EXPECT_GE(model.Predict(more).p50, p.p50);
        EXPECT_GE(model.Predict(more).p99, p.p99);
      }
    }
  }
}

TEST(CostModel, AHiccupMovesNothingMuch) {
  Random random(5);
  const TrueCosts costs;
  CostModel model;
  for (int i = 0; i < 100; ++i) {
    const StepShape shape = RandomShape(random);
    model.Observe(shape, Took(costs, shape));
  }
  const StepShape probe{0, 128, 4};
  const auto before = static_cast<double>(model.Predict(probe).p50.count());
  model.Observe(probe, Took(costs, probe, 200));
  model.Observe({1, 0, 0}, Micros(0));
  EXPECT_NEAR(static_cast<double>(model.Predict(probe).p50.count()) / before, 1, 0.1);
}

TEST(CostModel, FollowsALastingChange) {
  Random random(6);
  const TrueCosts costs;
  for (const double factor : {0.1, 0.4, 3.0, 12.0}) {
    CostModel model;
    for (int i = 0; i < 100; ++i) {
      const StepShape shape = RandomShape(random);
      model.Observe(shape, Took(costs, shape));
    }
    for (int i = 0; i < 400; ++i) {
      const StepShape shape = RandomShape(random);
      model.Observe(shape, Took(costs, shape, factor));
    }
    const StepShape probe{0, 128, 4};
    EXPECT_NEAR(static_cast<double>(model.Predict(probe).p50.count()) / costs.Of(probe) / factor, 1,
                0.15)
        << factor;
  }
}

TEST(CostModel, AnHourOfDecodingDoesNotForgetThePrefill) {
  const TrueCosts costs;
  CostModel model;
  for (uint32_t rows = 16; rows < 320; rows += 16) {
    model.Observe({0, rows, 0}, Took(costs, {0, rows, 0}));
  }
  for (uint32_t i = 0; i < 200'000; ++i) {
    const StepShape shape{0, 0, 1 + i % 8};
    model.Observe(shape, Took(costs, shape));
  }
  const StepShape probe{0, 300, 0};
  EXPECT_NEAR(static_cast<double>(model.Predict(probe).p50.count()) / costs.Of(probe), 1, 0.1);
}

// The first steps of a server all have one shape; splitting them must not look free.
TEST(CostModel, OneShapeAloneIsPricedByTheUnit) {
  CostModel model;
  for (int i = 0; i < 3; ++i) model.Observe({1, 300, 0}, Micros(60'000));
  const auto whole = static_cast<double>(model.Predict({1, 300, 0}).p50.count());
  EXPECT_NEAR(whole, 60'000, 6'000);
  const auto half = static_cast<double>(model.Predict({1, 150, 0}).p50.count());
  EXPECT_LT(half, 0.85 * whole);
  EXPECT_GT(model.Predict({0, 300, 0}).p50.count(), 15'000);
}

TEST(CostModel, SameObservationsSamePredictions) {
  CostModel a;
  CostModel b;
  Random random(11);
  for (int i = 0; i < 200; ++i) {
    const StepShape shape = RandomShape(random);
    const Micros took(1 + random.Below(10'000));
    a.Observe(shape, took);
    b.Observe(shape, took);
    EXPECT_EQ(a.Predict(shape).p99, b.Predict(shape).p99);
  }
}

TEST(CostModel, ExtremesStayFinite) {
  CostModel model;
  for (int i = 0; i < 20; ++i) {
    model.Observe({UINT32_MAX, UINT32_MAX, UINT32_MAX}, Micros::max());
    model.Observe({1, 1, 1}, Micros(-5));
  }
  const CostPrediction p = model.Predict({UINT32_MAX, UINT32_MAX, UINT32_MAX});
  EXPECT_GE(p.p50.count(), 0);
  EXPECT_LE(p.p99.count(), 1'000'000'000'000);
}

CostModel Trained(uint64_t seed, int steps) {
  Random random(seed);
  const TrueCosts costs{800, 2500, 1500, 40, 120, 0};
  CostModel model;
  for (int i = 0; i < steps; ++i) {
    const StepShape shape = RandomShape(random);
    model.Observe(shape, Took(costs, shape, 0.9 + 0.2 * random.Uniform()));
  }
  return model;
}

TEST(CostModel, ARestoredOnePredictsAndLearnsAsBefore) {
  for (const int steps : {0, 1, 7, 500}) {
    CostModel original = Trained(3, steps);
    absl::StatusOr<CostModel> restored = CostModel::Restore(original.Save());
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(restored->Save(), original.Save());
    Random random(11);
    for (int i = 0; i < 300; ++i) {
      const StepShape shape = RandomShape(random);
      EXPECT_EQ(restored->Predict(shape).p50, original.Predict(shape).p50);
      EXPECT_EQ(restored->Predict(shape).p99, original.Predict(shape).p99);
      const Micros took(1 + random.Below(20'000));
      original.Observe(shape, took);
      restored->Observe(shape, took);
    }
    EXPECT_EQ(restored->observations(), original.observations());
  }
}

TEST(CostModel, NumbersThatNoModelHasAreRefused) {
  const std::vector<double> good = Trained(5, 200).Save();
  ASSERT_EQ(good.size(), CostModel::kSavedNumbers);
  EXPECT_FALSE(CostModel::Restore({}).ok());
  EXPECT_FALSE(CostModel::Restore({good.data(), good.size() - 1}).ok());
  for (size_t i = 0; i < good.size(); ++i) {
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL, -1e10, 1e300}) {
      std::vector<double> numbers = good;
      numbers[i] = bad;
      EXPECT_FALSE(CostModel::Restore(numbers).ok()) << "number " << i << " = " << bad;
    }
  }
  // Within the ranges of single numbers, any: a prediction stays a time.
  Random random(7);
  for (int run = 0; run < 2000; ++run) {
    std::vector<double> numbers = good;
    for (int k = 0; k < 5; ++k) {
      numbers[random.Below(static_cast<uint32_t>(numbers.size()))] =
          std::exp2(120.0 * random.Uniform() - 60.0);
    }
    const absl::StatusOr<CostModel> model = CostModel::Restore(numbers);
    if (!model.ok()) continue;
    const CostPrediction all = model->Predict({8, 1024, 64});
    EXPECT_GE(all.p50.count(), 0);
    EXPECT_GE(all.p99, all.p50);
    EXPECT_GE(all.p50, model->Predict({4, 512, 32}).p50);
  }
}

}  // namespace
}  // namespace saccade
