// Study of the sm_90a forward: k_prepare and k_walk against the fp64 recurrence on many packings,
// then times with a cold L2. Prints per case the rel-RMS of o (all, worst document and head, worst
// chunk), of the final states, and of the chunk records of a few chunks; last a table of times.
// Usage: forward [check] [case=N] [time] [walk] [prof]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cuda/sm90/prepare.h"
#include "backend/cuda/sm90/schedule.h"
#include "backend/cuda/sm90/tensor_map.h"
#include "backend/cuda/sm90/walk.h"
#include "oracle.cuh"

using namespace gdn::sm90;

template <typename T>
struct Buffer {
  T* data = nullptr;
  int64_t count = 0;
  explicit Buffer(int64_t n = 0, int fill = 0xff) : count(n) {
    if (n == 0) return;
    CHECK(cudaMalloc(&data, n * sizeof(T)));
    CHECK(cudaMemset(data, fill, n * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    if (count) CHECK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  std::vector<T> host(int64_t offset = 0, int64_t n = -1) const {
    std::vector<T> out(n < 0 ? count : n);
    CHECK(cudaMemcpy(out.data(), data + offset, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
};

struct Case {
  std::string name;
  std::vector<int64_t> docs;
  int H, HV;
  lab::Gate gate = lab::kModel;
  bool norm = false, packed = false, init = false;
  float pull = 0, size = 1;
  int lanes = 0;     // 0: 132 / group
  int segments = 1;  // > 1: each document is cut in so many segments, entered from folded summaries
};

void must(const gdn::Status& status) {
  if (!status) {
    std::printf("FAILED: %s\n", status.message().c_str());
    std::exit(1);
  }
}

struct Run {
  Case c;
  int G, N;
  int64_t T, rows, chunks = 0;
  std::vector<int64_t> cu{0};
  std::vector<gdn::cuda::ChunkRow> chunk_table;
  std::vector<int> chunk_doc;
  std::vector<Chain> chains;
  int blocks = 0, summary_blocks = 0;
  Schedule schedule;
  int64_t stride_q, stride_k, stride_v;
  Buffer<lab::bf16> qkv, q, k, v, o;
  Buffer<float> g, beta, init, final_state;
  lab::bf16 *pq, *pk, *pv;
  Buffer<lab::bf16> tiles;
  Buffer<float> gates, norms, hand_over, enter, leave, map;
  Buffer<int> flags;
  Buffer<gdn::cuda::ChunkRow> chunk_rows;
  Buffer<int64_t> chunk_count;
  Buffer<WalkPiece> pieces, summary_pieces;
  Buffer<int32_t> begin, summary_begin;
  PrepareParams prepare{};
  WalkParams walk{}, summary{};

  static int64_t total(const Case& c) {
    int64_t n = 0;
    for (auto d : c.docs) n += d;
    return n;
  }
  static constexpr int64_t kSlack = 70;
  explicit Run(const Case& cc)
      : c(cc),
        G(c.HV / c.H),
        N(c.docs.size()),
        T(total(c)),
        rows(T + kSlack),
        qkv(c.packed ? rows * (2 * c.H + c.HV) * 128 : 0),
        q(c.packed ? 0 : rows * c.H * 128),
        k(c.packed ? 0 : rows * c.H * 128),
        v(c.packed ? 0 : rows * c.HV * 128),
        o(rows * c.HV * 128),
        g(rows * c.HV),
        beta(rows * c.HV),
        init(c.init ? int64_t{N} * c.HV * 16384 : 0),
        final_state(int64_t{N} * c.HV * 16384),
        tiles(count_chunks(c) * c.HV * kRecordElements),
        gates(count_chunks(c) * c.HV * 128),
        norms(count_chunks(c) * c.H * 128),
        hand_over(256ll * G * 16384),
        enter(c.segments > 1 ? slots(c) * c.HV * 16384 : 0),
        leave(c.segments > 1 ? slots(c) * c.HV * 16384 : 0),
        map(c.segments > 1 ? slots(c) * c.HV * 16384 : 0),
        flags(256 * G * 2, 0),
        chunk_rows(make_chunks()),
        chunk_count(std::vector<int64_t>{chunks}),
        pieces(make_pieces(false)),
        summary_pieces(make_pieces(true)),
        begin(schedule_begin(false)),
        summary_begin(schedule_begin(true)) {
    stride_q = stride_k = c.H * 128, stride_v = c.HV * 128;
    pq = q.data, pk = k.data, pv = v.data;
    if (c.packed) {
      stride_q = stride_k = stride_v = (2 * c.H + c.HV) * 128;
      pq = qkv.data, pk = pq + c.H * 128, pv = pk + c.H * 128;
    }
    const auto grid = [](int64_t n, int per) { return static_cast<unsigned>((n + per - 1) / per); };
    lab::make_rows<<<grid(T * c.H, 8), 256>>>(pq, stride_q, T, c.H, 1, !c.norm, 0, c.size);
    lab::make_rows<<<grid(T * c.H, 8), 256>>>(pk, stride_k, T, c.H, 2, !c.norm, c.pull, c.size);
    lab::make_rows<<<grid(T * c.HV, 8), 256>>>(pv, stride_v, T, c.HV, 3, false, 0, 1);
    lab::make_gates<<<grid(T * c.HV, 256), 256>>>(g.data, beta.data, T, c.HV, c.gate);
    if (c.init) {
      std::vector<float> host(init.count);
      for (size_t i = 0; i < host.size(); ++i)
        host[i] = 0.2f * (((i * 2654435761u) >> 7) % 2001 / 1000.0f - 1);
      CHECK(cudaMemcpy(init.data, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    fill_params();
  }
  static int64_t count_chunks(const Case& c) {
    int64_t n = 0;
    for (auto d : c.docs) n += (d + 63) / 64;
    return n;
  }
  static int64_t slots(const Case& c) { return int64_t(c.docs.size()) * c.segments; }
  std::vector<gdn::cuda::ChunkRow> make_chunks() {
    std::vector<gdn::cuda::ChunkRow> table;
    for (int d = 0; d < N; ++d) {
      const int64_t n = c.docs[d], first = table.size(), count = (n + 63) / 64,
                    step = (count + c.segments - 1) / c.segments;
      for (int64_t x = 0; x < count; ++x) {
        table.push_back({cu[d] + x * 64, int(std::min<int64_t>(64, n - x * 64)), 0});
        chunk_doc.push_back(d);
      }
      for (int s = 0; s < c.segments; ++s) {
        const int64_t b = s * step, e = std::min(count, b + step);
        if (b >= e) continue;
        Chain chain;
        chain.row = cu[d] + b * 64, chain.first_chunk = first + b,
        chain.tokens = std::min(n, e * 64) - b * 64;
        if (s > 0)
          chain.enter = StateKind::kSlot, chain.enter_index = d * c.segments + s;
        else if (c.init)
          chain.enter = StateKind::kDocument, chain.enter_index = d;
        if (e == count) chain.leave = StateKind::kDocument, chain.leave_index = d;
        chains.push_back(chain);
      }
      cu.push_back(cu.back() + n);
    }
    chunk_table = table, chunks = table.size();
    return table;
  }
  Schedule make(bool for_summary) {
    if (!for_summary) return make_schedule(chains, c.H, c.lanes ? c.lanes : std::max(1, 132 / G));
    if (c.segments == 1) return {};
    std::vector<Chain> wanted;
    for (Chain x : chains) {
      const int64_t d = chunk_doc[x.first_chunk],
                    s = x.enter == StateKind::kSlot ? x.enter_index : d * c.segments;
      Chain b = x;
      if (x.enter == StateKind::kSlot) b.enter = StateKind::kNone;
      b.leave = StateKind::kSlot, b.leave_index = s;
      wanted.push_back(b);
      if (x.enter == StateKind::kSlot) {
        b.enter = StateKind::kIdentity, b.leave = StateKind::kIdentity;
        wanted.push_back(b);
      }
    }
    return make_schedule(wanted, c.H, c.lanes ? c.lanes : std::max(1, 132 / G), Cuts::kNone);
  }
  std::vector<WalkPiece> make_pieces(bool s) {
    Schedule x = make(s);
    if (!s) schedule = x;
    return x.pieces;
  }
  std::vector<int32_t> schedule_begin(bool s) {
    Schedule x = make(s);
    (s ? summary_blocks : blocks) = std::max(0, x.lane_groups()) * G;
    return x.piece_begin;
  }
  void fill_params() {
    const float scale = 1 / std::sqrt(128.0f);
    prepare.q = pq, prepare.k = pk, prepare.q_stride = stride_q, prepare.k_stride = stride_k;
    prepare.g = {g.data, c.HV, 1, gdn::DType::kFloat32};
    prepare.beta = {beta.data, c.HV, 1, gdn::DType::kFloat32};
    prepare.chunks = chunk_rows.data, prepare.tiles = tiles.data, prepare.gates = gates.data,
    prepare.norms = norms.data;
    prepare.num_chunks = chunk_count.data, prepare.max_chunks = chunks;
    prepare.heads_k = c.H, prepare.heads_v = c.HV, prepare.scale = scale;
    prepare.l2norm = c.norm;
    prepare.flags = flags.data, prepare.num_flags = static_cast<int>(flags.count);
    must(make_tensor_map(pq, rows, c.H, stride_q, 2, &walk.q));
    must(make_tensor_map(pk, rows, c.H, stride_k, 2, &walk.k));
    must(make_tensor_map(pv, rows, c.HV, stride_v, 2, &walk.v));
    must(make_tensor_map(o.data, rows, c.HV, c.HV * 128, 1, &walk.o_map));
    walk.tiles = tiles.data, walk.gates = gates.data, walk.norms = norms.data, walk.o = o.data,
    walk.o_stride = c.HV * 128;
    walk.initial_state = {init.data, c.HV * 16384ll, 16384, 128, 1};
    walk.final_state = {final_state.data, c.HV * 16384ll, 16384, 128, 1};
    walk.log2_bound = -17.0f * 1.4427f;
    walk.enter_table = enter.data, walk.leave_table = leave.data, walk.map_table = map.data;
    walk.enter_slots = walk.leave_slots = walk.map_slots = slots(c);
    walk.hand_over = hand_over.data, walk.flags = flags.data, walk.pieces = pieces.data,
    walk.piece_begin = begin.data;
    walk.heads_k = c.H, walk.heads_v = c.HV, walk.group = G;
    summary = walk;
    summary.pieces = summary_pieces.data, summary.piece_begin = summary_begin.data;
  }
  void run_prepare() { must(launch_prepare(prepare, {})); }
  void run_walk() { must(launch_walk(walk, blocks, {})); }
  void run_summary() {
    if (summary_blocks) must(launch_summary(summary, summary_blocks, {}));
  }
  // Host fold of the summaries into the entry table, fp64.
  void fold() {
    if (c.segments == 1) return;
    CHECK(cudaDeviceSynchronize());
    const auto b = leave.host(), m = map.host();
    std::vector<float> e(enter.count, 0.0f);
    for (int h = 0; h < c.HV; ++h)
      for (int d = 0; d < N; ++d) {
        std::vector<double> s(16384, 0.0);
        for (int i = 0; i + 1 < c.segments; ++i) {
          const int64_t at = (h * slots(c) + d * c.segments + i) * 16384;
          std::vector<double> n(16384);
          for (int x = 0; x < 128; ++x)
            for (int y = 0; y < 128; ++y) {
              double sum = b[at + x * 128 + y];
              if (i > 0)
                for (int z = 0; z < 128; ++z) sum += double(m[at + x * 128 + z]) * s[z * 128 + y];
              n[x * 128 + y] = sum;
            }
          s = n;
          for (int x = 0; x < 16384; ++x) e[at + 16384 + x] = float(s[x]);
        }
      }
    CHECK(cudaMemcpy(enter.data, e.data(), e.size() * 4, cudaMemcpyHostToDevice));
  }

  lab::Problem problem(const Buffer<int64_t>& cu_rows) {
    return {pq,        pk,        pv,           stride_q, stride_k, stride_v,      g.data,
            beta.data, init.data, cu_rows.data, c.H,      c.HV,     prepare.scale, c.norm};
  }

  // fp64 W of some records.
  void check_records() {
    std::vector<std::pair<int64_t, int>> wanted;
    for (int64_t x : {int64_t{0}, chunks / 2, chunks - 1})
      for (int h : {0, c.HV / 2 + (c.HV > 1), c.HV - 1})
        wanted.push_back({x, std::min(h, c.HV - 1)});
    double worst = 0, worst_gate = 0;
    std::string where;
    for (auto [x, h] : wanted) {
      const gdn::cuda::ChunkRow ch = chunk_table[x];
      const int n = ch.tokens, kh = h / G;
      std::vector<lab::bf16> rows_k(n * 128ll);
      CHECK(cudaMemcpy2D(rows_k.data(), 256, pk + ch.row * stride_k + kh * 128, stride_k * 2, 256,
                         n, cudaMemcpyDeviceToHost));
      const auto gg = g.host(ch.row * c.HV, n * c.HV), bb = beta.host(ch.row * c.HV, n * c.HV);
      std::vector<double> A(n * n), W(n * n), r(n, 1.0), G2(n);
      const auto key = [&](int i, int e) { return double(__bfloat162float(rows_k[i * 128 + e])); };
      for (int i = 0; i < n; ++i) {
        double sum = 0;
        for (int e = 0; e < 128; ++e) sum += key(i, e) * key(i, e);
        if (c.norm) r[i] = 1 / std::sqrt(sum + 1e-6);
        G2[i] =
            (i ? G2[i - 1] : 0) + std::max(double(gg[i * c.HV + h]), -88.0) * 1.4426950408889634;
      }
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < i; ++j) {
          double sum = 0;
          for (int e = 0; e < 128; ++e) sum += key(i, e) * key(j, e);
          A[i * n + j] = sum * r[i] * r[j];
        }
      for (int j = 0; j < n; ++j)
        for (int i = j + 1; i < n; ++i) {
          double sum = A[i * n + j];
          for (int m = j + 1; m < i; ++m) sum -= A[i * n + m] * bb[m * c.HV + h] * W[m * n + j];
          W[i * n + j] = sum;
        }
      const auto tile = tiles.host((x * c.HV + h) * kRecordElements, kRecordElements);
      const auto gate = gates.host((x * c.HV + h) * 128, 128);
      double diff[16] = {}, square[16] = {};
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j) {
          if (j / 8 > i / 8) continue;
          const double got =
              __bfloat162float(tile[((i / 8) * (i / 8 + 1) / 2 + j / 8) * 64 + i % 8 * 8 + j % 8]);
          const double ref = i < n && j < i ? -W[i * n + j] * std::exp2(G2[i] - G2[j]) : 0;
          double d = got - ref;
          if (!(std::fabs(d) < 1e15)) d = 1e15;
          diff[i / 16 * 4 + j / 16] += d * d, square[i / 16 * 4 + j / 16] += ref * ref;
        }
      double ds = 0, ss = 1e-300, upper = 0;
      for (int b = 0; b < 16; ++b)
        ds += diff[b], ss += square[b], upper += b % 4 > b / 4 ? diff[b] : 0;
      const double e = std::sqrt(ds / ss);
      if (n > 1 && e > worst) worst = e;
      for (int i = 0; i < n; ++i) {
        worst_gate = std::max(worst_gate, std::fabs(gate[i] - G2[i]) / (1e-3 + std::fabs(G2[i])));
        if (gate[64 + i] != bb[i * c.HV + h]) worst_gate = 1e9;
      }
      for (int i = n; i < 64; ++i)
        if (gate[64 + i] != 0 || gate[i] != gate[n - 1]) worst_gate = 2e9;  // bit by bit
      if (where.empty() && n > 1 && !(e < 1e-2)) {
        where = "  first bad record: chunk " + std::to_string(x) + " head " + std::to_string(h) +
                " block errors:";
        for (int b = 0; b < 16; ++b) {
          char text[64];
          std::snprintf(text, sizeof text, "%s%.1e", b % 4 ? " " : " | ",
                        std::sqrt(diff[b] / (square[b] + 1e-30)));
          where += text;
        }
      }
    }
    std::printf("  records: W %.2e gates %.1e\n", worst, worst_gate);
    if (!where.empty()) std::printf("%s\n", where.c_str());
  }

  bool check(bool repeat) {
    run_prepare(), run_summary(), fold(), run_walk();
    CHECK(cudaDeviceSynchronize());
    check_records();
    Buffer<int64_t> cu_rows(cu);
    Buffer<float> ref(rows * c.HV * 128), ref_state(final_state.count);
    lab::recurrence<<<N * c.HV, 512>>>(problem(cu_rows), ref.data, ref_state.data);
    CHECK(cudaGetLastError());
    std::vector<lab::Rows> parts;
    for (auto& x : chunk_table)
      for (int h = 0; h < c.HV; ++h) parts.push_back({x.row, x.tokens, h});
    Buffer<lab::Rows> part_rows(parts);
    Buffer<double> sums(3 * parts.size());
    lab::compare<<<parts.size(), 256>>>(o.data, c.HV * 128, ref.data, c.HV, part_rows.data,
                                        sums.data);
    std::vector<lab::Rows> states;
    for (int i = 0; i < N * c.HV; ++i) states.push_back({i * 128, 128, 0});
    Buffer<lab::Rows> state_rows(states);
    Buffer<double> state_sums(3 * states.size());
    lab::compare<<<states.size(), 256>>>(final_state.data, 128, ref_state.data, 1, state_rows.data,
                                         state_sums.data);
    CHECK(cudaDeviceSynchronize());
    const auto s = sums.host(), t = state_sums.host();
    double diff = 0, square = 0, worst_max = 0, worst_head = 0, worst_chunk = 0;
    std::vector<double> dh(N * c.HV), sh(N * c.HV), first_chunks;
    int64_t bad_chunk = -1;
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t chunk = i / c.HV;
      const int at = chunk_doc[chunk] * c.HV + parts[i].head;
      diff += s[3 * i], square += s[3 * i + 1], dh[at] += s[3 * i], sh[at] += s[3 * i + 1];
      worst_max = std::max(worst_max, s[3 * i + 2]);
      const double e = std::sqrt(s[3 * i] / (s[3 * i + 1] + 1e-30));
      if (e > worst_chunk) worst_chunk = e, bad_chunk = i;
    }
    for (int i = 0; i < N * c.HV; ++i)
      worst_head = std::max(worst_head, std::sqrt(dh[i] / (sh[i] + 1e-30)));
    double sd = 0, ss = 1e-300, worst_state = 0;
    for (size_t i = 0; i < states.size(); ++i) {
      sd += t[3 * i], ss += t[3 * i + 1];
      worst_state = std::max(worst_state, std::sqrt(t[3 * i] / (t[3 * i + 1] + 1e-12)));
    }
    const double e = std::sqrt(diff / square), se = std::sqrt(sd / ss);
    const bool ok = e < 5e-3 && worst_head < 1e-2 && se < 5e-3;
    std::printf(
        "  o %.3e (worst doc+head %.2e, worst chunk %.2e, max %.2e)  state %.3e (worst %.2e)  "
        "hand-overs %d  %s\n",
        e, worst_head, worst_chunk, worst_max, se, worst_state, schedule.hand_overs,
        ok ? "ok" : "WRONG");
    if (!ok) {
      const int h = parts[bad_chunk].head;
      std::printf("  worst at chunk %ld head %d; by chunk of document 0, head 0:",
                  long(bad_chunk / c.HV), h);
      for (int64_t x = 0; x < std::min<int64_t>(chunks, 8); ++x)
        std::printf(" %.1e", std::sqrt(s[3 * x * c.HV] / (s[3 * x * c.HV + 1] + 1e-30)));
      std::printf("\n");
      for (int64_t x : {int64_t{0}, std::min<int64_t>(1, chunks - 1)})
        for (int r : {0, 1, 17, 40}) {
          if (r >= chunk_table[x].tokens) continue;
          const int64_t at = (chunk_table[x].row + r) * c.HV * 128;
          const auto got = o.host(at, 128);
          const auto want = ref.host(at, 128);
          std::printf("  chunk %ld row %2d:", long(x), r);
          for (int e2 : {0, 1, 8, 16, 63, 64, 100})
            std::printf("  %.4f/%.4f", double(__bfloat162float(got[e2])), want[e2]);
          std::printf("\n");
        }
    }
    bool same = true;
    if (repeat) {
      const auto first = o.host();
      CHECK(cudaMemset(o.data, 0xff, o.count * 2));
      for (int i = 0; i < 3; ++i) run_walk();
      CHECK(cudaDeviceSynchronize());
      const auto again = o.host();
      same = std::memcmp(first.data(), again.data(), first.size() * 2) == 0;
      std::printf("  repeat bitwise %s\n", same ? "equal" : "DIFFERENT");
    }
    for (float x : final_state.host())
      if (!std::isfinite(x)) {
        std::printf("  state NOT FINITE\n");
        return false;
      }
    const auto slack = o.host(T * c.HV * 128, kSlack * c.HV * 128);
    for (auto x : slack)
      if (!std::isnan(__bfloat162float(x))) {
        std::printf("  wrote past the last document\n");
        return false;
      }
    return ok && same;
  }

  double time(int which, int repeats, Buffer<char>& flush) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    std::vector<float> ms;
    for (int i = 0; i < repeats + 2; ++i) {
      CHECK(cudaMemset(flush.data, i, flush.count));
      CHECK(cudaDeviceSynchronize());
      cudaEventRecord(a);
      if (which & 1) run_prepare();
      if (which & 4) run_summary();
      if (which & 2) run_walk();
      cudaEventRecord(b);
      CHECK(cudaEventSynchronize(b));
      float t;
      cudaEventElapsedTime(&t, a, b);
      if (i > 1) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    cudaEventDestroy(a), cudaEventDestroy(b);
    return ms[ms.size() / 2];
  }
};

const std::vector<int64_t> kM{12000, 9000, 6000, 3768, 2000};

int main(int argc, char** argv) {
  bool check = false, time = false, prof = false, walk = false;
  int only = -1;
  for (int i = 1; i < argc; ++i) {
    check |= !std::strcmp(argv[i], "check"), time |= !std::strcmp(argv[i], "time"),
        prof |= !std::strcmp(argv[i], "prof");
    walk |= !std::strcmp(argv[i], "walk");
    if (!std::strncmp(argv[i], "case=", 5)) only = std::atoi(argv[i] + 5);
  }
  int failed = 0;
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  if (check) {
    const std::vector<int64_t> small{1, 63, 64, 65, 300, 129, 7, 512};
    std::vector<Case> cases;
    cases.push_back({.name = "one chunk", .docs = {64}, .H = 1, .HV = 1, .gate = lab::kZero});
    cases.push_back({.name = "one chunk, state",
                     .docs = {64},
                     .H = 1,
                     .HV = 1,
                     .gate = lab::kSlow,
                     .init = true});
    cases.push_back({.name = "four chunks", .docs = {256}, .H = 1, .HV = 3, .gate = lab::kSlow});
    cases.push_back(
        {.name = "tails 2/6", .docs = small, .H = 2, .HV = 6, .gate = lab::kSlow, .init = true});
    cases.push_back({.name = "tails 2/6 packed, norm",
                     .docs = small,
                     .H = 2,
                     .HV = 6,
                     .gate = lab::kModel,
                     .norm = true,
                     .packed = true,
                     .init = true});
    cases.push_back({.name = "tails 4/4 two lanes",
                     .docs = small,
                     .H = 4,
                     .HV = 4,
                     .gate = lab::kZero,
                     .init = true,
                     .lanes = 2});
    cases.push_back({.name = "tails 2/4 one lane, large norm",
                     .docs = small,
                     .H = 2,
                     .HV = 4,
                     .gate = lab::kSlow,
                     .norm = true,
                     .size = 1000,
                     .lanes = 3});
    cases.push_back(
        {.name = "2/16, spikes", .docs = {1000, 700}, .H = 2, .HV = 16, .gate = lab::kSpike});
    cases.push_back({.name = "strong",
                     .docs = {1000, 700},
                     .H = 2,
                     .HV = 6,
                     .gate = lab::kStrong,
                     .norm = true});
    cases.push_back({.name = "correlated keys",
                     .docs = {2000},
                     .H = 2,
                     .HV = 6,
                     .gate = lab::kSlow,
                     .pull = 1.5f});
    cases.push_back({.name = "segments 2/6",
                     .docs = {1500, 2048, 777},
                     .H = 2,
                     .HV = 6,
                     .gate = lab::kSlow,
                     .init = true,
                     .segments = 3});
    cases.push_back({.name = "segments 2/6, forgetting",
                     .docs = {1500, 4048, 777},
                     .H = 2,
                     .HV = 6,
                     .gate = lab::kModel,
                     .init = true,
                     .segments = 3});
    for (auto& c : cases) {
      if (only >= 0 && &c != &cases[only]) continue;
      std::printf("%s\n", c.name.c_str());
      Run r(c);
      failed += !r.check(true);
    }
    if (only >= 0) return failed;
    for (bool norm : {false, true}) {
      std::printf("M, model gates, norm %d\n", norm);
      Run r({.name = "M", .docs = kM, .H = 16, .HV = 48, .norm = norm});
      failed += !r.check(true);
    }
    std::printf("M, slow gates\n");
    Run r({.name = "M", .docs = kM, .H = 16, .HV = 48, .gate = lab::kSlow});
    failed += !r.check(false);
    std::printf("%d cases failed\n", failed);
  }
  if (prof) {
    Run r({.name = "M", .docs = kM, .H = 16, .HV = 48});
    for (int i = 0; i < 2; ++i) r.run_prepare(), r.run_walk();
    CHECK(cudaDeviceSynchronize());
  }
  if (walk) {
    Buffer<char> flush(256 << 20);
    for (const auto& docs : {kM, std::vector<int64_t>{32768}}) {
      Run r({.name = "M", .docs = docs, .H = 16, .HV = 48});
      r.run_prepare();
      const double ms = r.time(2, 15, flush);
      std::printf("%zu documents: walk %.4f ms, %.3f us per chunk\n", docs.size(), ms,
                  ms * 1e3 / r.schedule.makespan);
    }
  }
  if (time) {
    Buffer<char> flush(256 << 20);
    struct Shape {
      const char* name;
      std::vector<int64_t> docs;
      int H, HV;
    };
    for (const Shape& x :
         {Shape{"M", kM, 16, 48}, Shape{"N", {2049, 3001, 3142}, 2, 6},
          Shape{"8x4096", std::vector<int64_t>(8, 4096), 16, 48}, Shape{"1x32768", {32768}, 16, 48},
          Shape{"G",
                {3598, 4930, 6262, 7593, 8925, 10256, 11588, 12920, 14251, 15583, 16914, 18252},
                16,
                48}}) {
      for (bool norm : {false, true}) {
        Run r({.name = x.name, .docs = x.docs, .H = x.H, .HV = x.HV, .norm = norm});
        const int n = 15;
        const double p = r.time(1, n, flush), w = r.time(2, n, flush), both = r.time(3, n, flush);
        std::printf(
            "%-8s norm %d: prepare %.4f walk %.4f both %.4f ms; makespan %ld -> %.3f us per chunk; "
            "%.0f chunk-heads\n",
            x.name, norm, p, w, both, long(r.schedule.makespan), w * 1e3 / r.schedule.makespan,
            double(r.chunks) * x.HV);
      }
    }
  }
  return failed;
}
