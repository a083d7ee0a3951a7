// One token of the recurrence and of its adjoint (docs/math.md, sections 1 and 2), in fp64.
// States are row-major [K, V]; vectors are contiguous.
#pragma once

#include <cstdint>

namespace gdn::reference {

struct Dims {
  int64_t k = 0;
  int64_t v = 0;

  int64_t state() const { return k * v; }
};

// What a token does to the state: after the norm and the activations.
struct Token {
  const double* k = nullptr;  // [K]
  const double* v = nullptr;  // [V]; null: 0
  double decay = 1;           // alpha = exp(g)
  double beta = 0;
};

// residual = v - alpha S^T k;  S <- alpha S + beta k residual^T
void update_state(Dims dims, const Token& token, double* state, double* residual /* [V] */);

// o = scale S^T q
void read_state(Dims dims, const double* q, double scale, const double* state, double* o);

// dS <- dS + scale q do^T: what the output adds to the gradient of the state after the token.
void add_output_gradient(Dims dims, const double* q, double scale, const double* d_o,
                         double* dstate);

// dS <- M_t^T dS = alpha (dS - beta k (dS^T k)^T): from after the token to before it.
void pull_back(Dims dims, const Token& token, double* dstate, double* work /* [V] */);

// The whole adjoint of one token.
struct TokenAdjoint {
  // Given.
  const double* q = nullptr;         // [K]
  const double* state = nullptr;     // [K, V] before the token
  const double* residual = nullptr;  // [V] of update_state
  const double* d_o = nullptr;       // [V]; null: 0
  double scale = 1;
  // Results.
  double* dq = nullptr;  // [K], added to
  double* dk = nullptr;  // [K], added to
  double* dv = nullptr;  // [V]
  double dlog_decay = 0;
  double dbeta = 0;
};

// dS comes in as the gradient of the state after the token (from later tokens alone) and leaves as
// that before it. work: [2 V].
void adjoint(Dims dims, const Token& token, TokenAdjoint& io, double* dstate, double* work);

// Sum of a_i b_i over eight interleaved partial sums: one fixed order that vectorises.
double dot(const double* a, const double* b, int64_t n);

}  // namespace gdn::reference
