#include "backend/reference/recurrence.h"

#include <algorithm>

namespace gdn::reference {
namespace {

// y <- y + a x
void axpy(int64_t n, double a, const double* __restrict x, double* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// y <- b y + a x
void axpby(int64_t n, double a, const double* __restrict x, double b, double* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] = b * y[i] + a * x[i];
}

// out = S^T x
void transposed_product(Dims dims, const double* state, const double* x, double* out) {
  std::fill_n(out, dims.v, 0.0);
  for (int64_t i = 0; i < dims.k; ++i) axpy(dims.v, x[i], state + i * dims.v, out);
}

}  // namespace

double dot(const double* __restrict a, const double* __restrict b, int64_t n) {
  constexpr int kLanes = 8;
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < n; ++i, ++j) lane[j] += a[i] * b[i];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

void update_state(Dims dims, const Token& token, double* state, double* residual) {
  transposed_product(dims, state, token.k, residual);
  for (int64_t j = 0; j < dims.v; ++j) {
    residual[j] = (token.v ? token.v[j] : 0.0) - token.decay * residual[j];
  }
  for (int64_t i = 0; i < dims.k; ++i) {
    axpby(dims.v, token.beta * token.k[i], residual, token.decay, state + i * dims.v);
  }
}

void read_state(Dims dims, const double* q, double scale, const double* state, double* o) {
  transposed_product(dims, state, q, o);
  for (int64_t j = 0; j < dims.v; ++j) o[j] *= scale;
}

void add_output_gradient(Dims dims, const double* q, double scale, const double* d_o,
                         double* dstate) {
  for (int64_t i = 0; i < dims.k; ++i) axpy(dims.v, scale * q[i], d_o, dstate + i * dims.v);
}

void pull_back(Dims dims, const Token& token, double* dstate, double* work) {
  transposed_product(dims, dstate, token.k, work);
  for (int64_t i = 0; i < dims.k; ++i) {
    axpby(dims.v, -token.decay * token.beta * token.k[i], work, token.decay, dstate + i * dims.v);
  }
}

// Forward: u = S^T k, r = v - alpha u, w = beta r, S' = alpha S + k w^T, o = scale S'^T q.
void adjoint(Dims dims, const Token& token, TokenAdjoint& io, double* dstate, double* work) {
  const int64_t n = dims.v;
  const double* r = io.residual;
  double* dw = work;
  double* du = work + n;
  if (io.d_o) add_output_gradient(dims, io.q, io.scale, io.d_o, dstate);

  std::fill_n(dw, n, 0.0);
  const double r_do = io.d_o ? dot(r, io.d_o, n) : 0.0;
  double ddecay = 0;
  for (int64_t i = 0; i < dims.k; ++i) {
    const double* s = io.state + i * n;
    const double* ds = dstate + i * n;
    if (io.d_o) {  // dq = scale S' do, row by row from S
      io.dq[i] += io.scale * (token.decay * dot(s, io.d_o, n) + token.beta * token.k[i] * r_do);
    }
    axpy(n, token.k[i], ds, dw);             // dw = dS'^T k
    io.dk[i] += token.beta * dot(ds, r, n);  // dk = dS' w
    ddecay += dot(ds, s, n);                 // dalpha = <dS', S>
  }

  io.dbeta = dot(dw, r, n);
  for (int64_t j = 0; j < n; ++j) {
    io.dv[j] = token.beta * dw[j];    // dr = beta dw = dv
    du[j] = -token.decay * io.dv[j];  // r = v - alpha u
  }
  double dr_u = 0;  // dalpha also gets -<dr, u>, where u_j = sum_i S_ij k_i
  for (int64_t i = 0; i < dims.k; ++i) {
    const double* s = io.state + i * n;
    const double s_dr = dot(s, io.dv, n);
    dr_u += token.k[i] * s_dr;
    io.dk[i] -= token.decay * s_dr;                         // u = S^T k: dk += S du
    axpby(n, token.k[i], du, token.decay, dstate + i * n);  // dS = alpha dS' + k du^T
  }
  // alpha = exp(g): a forgotten state (alpha = 0, g = -inf) passes no gradient to its gate.
  io.dlog_decay = token.decay * (ddecay - dr_u);
}

}  // namespace gdn::reference
