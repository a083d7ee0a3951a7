// Every instruction set that this machine can run gives right results, not only the best one.
#include "backend/cpu/targets.h"
// Before highway.h, which reads it.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/stage_call.h"
#include "backend/reference/by_hand.h"
#include "check/accuracy.h"

namespace gdn {
namespace {

using reference::plan_by_hand;
using reference::plan_uncut;
using reference::run_by_hand;

void use_targets(int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().DeInit();
}

TEST(CpuTargets, EachIsAccurate) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    use_targets(target);
    ASSERT_STREQ(cpu::target_name(), hwy::TargetName(target));
    for (DType operand : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(fmt::format("{} {}", hwy::TargetName(target), to_string(operand)));
      BatchSpec spec;
      spec.documents = {150, 3};
      spec.heads_qk = 1;
      spec.dim_k = 48;
      spec.dim_v = 80;
      spec.operand = operand;
      spec.heads_v = 2;
      spec.initial_state = spec.dfinal_state = true;
      spec.options.qk_l2norm = true;
      const Batch batch = make_batch(spec).value();
      const Batch wide = widen(batch);
      const BatchResult want = run_by_hand(wide, plan_uncut(wide));
      const BatchResult got =
          run_by_hand(batch, plan_by_hand(batch, {{64, 64, 22}, {3}}), nullptr, {}, &cpu_backend());
      for (const ResultTensor& t : kResultTensors) {
        const HostTensor &x = got.*t.member, &ref = want.*t.member;
        if (!x.present() && !ref.present()) continue;
        const Accuracy accuracy = compare(x.view, ref.view, t.head_axis, {});
        EXPECT_TRUE(passes(accuracy, bars(operand, t.name))) << t.name << " " << accuracy.rel_rms;
      }
    }
  }
  use_targets(0);
}

}  // namespace
}  // namespace gdn
