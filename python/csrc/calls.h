// A forward or backward with the tensors it needs: what the ops of call_ops.cc run to its end, or
// pause at every collective.
#pragma once

#include <memory>
#include <optional>

#include "session.h"

namespace gdn_torch {

// q, k [B, T, H, K] or [T, H, K], and so on: gdn/problem.h says which operand has which shape.
struct Inputs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& g;
  const Tensor& beta;
  const MaybeTensor& A_log;
  const MaybeTensor& dt_bias;
  const MaybeTensor& initial_state;
  std::optional<double> scale;
  int64_t flags;
};

// A call under way, with everything it points to.
struct Pending {
  std::shared_ptr<const Prepared> prepared;
  std::vector<Tensor> kept;    // inputs and outputs
  std::vector<Tensor> blocks;  // workspace and saved set: where messages lie
  gdn::Stream stream;
  std::optional<TablesRead> read;
  std::optional<gdn::Call> call;
  gdn::Message message;
};

Registry<Pending>& pendings();

std::shared_ptr<Pending> pending_at(int64_t handle);

struct Forward {
  Tensor o;
  Tensor final_state;  // no elements where not wanted
  Tensor saved;        // no elements where not kept
  std::shared_ptr<Pending> pending;
};

struct Gradients {
  Tensor dq, dk, dv, dg, dbeta;
  Tensor dA_log, ddt_bias, dinitial_state;  // no elements where there is no such operand
  std::shared_ptr<Pending> pending;
};

std::shared_ptr<Session> session_for(int64_t session, const MaybeTensor& cu_seqlens,
                                     const Inputs& in);
gdn::Problem problem_of(const Inputs& in);

// `again`: a saved set that an earlier forward of the same inputs kept; then nothing is exchanged.
// `functional`: no result is shared with other calls, those without elements neither.
Forward start_forward(Session& session, const Inputs& in, const MaybeTensor& workspace,
                      const MaybeTensor& again, bool save, bool want_final, bool functional);

// `packed`: dq, dk and dv are column views of one row [.., T, 2 H K + HV V].
Gradients start_backward(Session& session, const Inputs& in, const MaybeTensor& d_o,
                         const MaybeTensor& dfinal_state, const MaybeTensor& saved,
                         const MaybeTensor& workspace, bool packed, bool functional);

// To the end; an error where the call wants to talk to other ranks.
void finish(Pending& pending);

}  // namespace gdn_torch
