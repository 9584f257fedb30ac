#include "product.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "dense.h"
#include "floats.h"
#include "pool.h"

namespace ingot {
namespace {

std::atomic<Sgemm> blas{nullptr};
std::atomic<bool> one_path{false};

constexpr int kFew = 32;               // with more rows than this, a BLAS multiplies plain weights faster
constexpr int kPanel = 64;             // rows of plain weights that are one task for it
constexpr int kMany = 12;              // with more rows than this, wide products of packed weights are faster
constexpr int kRowsAtOnce = 256;       // activation rows that are quantised and multiplied before the next ones
constexpr int kTasksPerThread = 4;     // so that a thread that was held up does not hold up the others
constexpr size_t kTaskBytes = 1 << 17;  // weights of a task: they stay in the second-level cache for all rows
constexpr int kLeastRows = 16;
constexpr int kLeastPanel = 32;        // rows of packed weights that are unpacked at once for wide products
constexpr size_t kPanelBytes = 1 << 19;  // that unpacked weights take at most, if that is not too few rows

// Some rows of one matrix.
struct Task {
  const Product* product;
  int first, last;
};

// Parts of about `size` rows, which begin where tiles do.
void divide(const Product& product, int size, std::vector<Task>& tasks) {
  const int tile = kernels().tile;
  size = std::max(size + tile - 1, tile) / tile * tile;
  for (int first = 0; first < product.w->rows; first += size)
    tasks.push_back({&product, first, std::min(first + size, product.w->rows)});
}

// In such an order that threads which take turns each go through a part of the weights of their own from its beginning to
// its end, as what lies behind what a thread reads is fetched before it asks for it.
std::vector<Task> in_turns(const std::vector<Task>& tasks, int threads) {
  const size_t each = (tasks.size() + threads - 1) / threads;
  std::vector<Task> ordered;
  for (size_t turn = 0; turn < each; turn++)
    for (size_t index = turn; index < tasks.size(); index += each) ordered.push_back(tasks[index]);
  return ordered;
}

// `times` as much as the products' weights belong to a task.
std::vector<Task> divided(const std::vector<Product>& products, int times = 1) {
  const int threads = Pool::shared().threads();
  int rows = 0;
  for (const Product& product : products) rows += product.w->rows;
  const int share = threads == 1 ? rows : std::max(kLeastRows, rows / (threads * kTasksPerThread));
  std::vector<Task> tasks;
  for (const Product& product : products) {
    const Matrix& w = *product.w;
    divide(product, std::min(share, std::max(kLeastRows, static_cast<int>(kTaskBytes / (times * w.row_bytes())))), tasks);
  }
  return in_turns(tasks, threads);
}

void add_bias(const Task& task, int begin, int count) {
  const Matrix& w = *task.product->w;
  if (w.bias == nullptr) return;
  for (int m = begin; m < begin + count; m++)
    for (int n = task.first; n < task.last; n++) task.product->y[static_cast<size_t>(m) * w.rows + n] += w.bias[n];
}

}  // namespace

QuantisedRows::QuantisedRows(int count, int columns, int group)
    : count(count), columns(columns), group(group), blocks_(static_cast<size_t>(rows_of_lots(count)) * columns / kBlock),
      values_(2 * blocks_ * kBlock), scales_(blocks_), sums_(blocks_ * kBlock / group), halves_(2 * blocks_), marks_(blocks_) {
  clear();
  if (rows_of_lots(count) == count) return;
  // A lot in which rows are missing: nothing of them is kept, but they are read.
  const Lot last = lot_of(count - 1, count);
  const Quantised out = at(last.first);
  const size_t values = static_cast<size_t>(last.size) * columns;
  std::fill_n(out.values, values, 0);
  std::fill_n(out.scales, values / kBlock, 0.0f);
  std::fill_n(out.sums, values / group, 0.0f);
  std::fill_n(out.halves, 2 * values / kBlock, 0.0f);
}

void QuantisedRows::clear() {
  std::fill_n(marks_.data(), blocks_, 0);
  std::fill_n(values_.data() + blocks_ * kBlock, blocks_ * kBlock, 0);
}

void QuantisedRows::put(int row, const float* x) {
  const Lot lot = lot_of(row, count);
  kernels().quantise(x, columns, group, lot.size, row - lot.first, at(lot.first));
}

Quantised QuantisedRows::at(int first) const {
  const size_t begin = static_cast<size_t>(first) * columns, block = begin / kBlock;
  return {values_.data() + begin, values_.data() + blocks_ * kBlock + begin, scales_.data() + block,
          sums_.data() + begin / group, halves_.data() + 2 * block, marks_.data() + block};
}

namespace {

// body(first, rows) for so many rows at a time that what is multiplied stays in the second-level cache.
template <class Body>
void each_part(int count, const Body& body) {
  for (int first = 0; first < count; first += kRowsAtOnce) body(first, std::min(kRowsAtOnce, count - first));
}

// A thread's own memory for what it computes before it is added or gated.
float* own_room(size_t size) {
  static thread_local Room<float> room;
  return room.at_least(size);
}

}  // namespace

void multiply(const std::vector<Product>& products, const QuantisedRows& x, bool adds) {
  const std::vector<Task> tasks = divided(products);
  each_part(x.count, [&](int begin, int count) {
    Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
      const auto [product, first, last] = tasks[index];
      const Matrix& w = *product->w;
      float* y = product->y + static_cast<size_t>(begin) * w.rows;
      if (!adds) {
        kernels().multiply(w.packed, x.at(begin), count, first, last, y, w.rows);
      } else {
        const int size = last - first;
        float* own = own_room(static_cast<size_t>(count) * size);
        kernels().multiply(w.packed.part(first, last), x.at(begin), count, 0, size, own, size);
        for (size_t m = 0; m < static_cast<size_t>(count); m++) floats().add(y + m * w.rows + first, own + m * size, size);
      }
      add_bias(tasks[index], begin, count);
    });
  });
}

void multiply_gated(const Matrix& gate, const Matrix& up, const QuantisedRows& x, float* y) {
  const std::vector<Task> tasks = divided({{&gate, y}}, 2);
  each_part(x.count, [&](int begin, int count) {
    Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
      const int first = tasks[index].first, size = tasks[index].last - first;
      const size_t all = static_cast<size_t>(count) * size;
      float *gates = own_room(2 * all), *ups = gates + all;
      for (auto [w, to] : {std::pair{&gate, gates}, std::pair{&up, ups}}) {
        kernels().multiply(w->packed.part(first, first + size), x.at(begin), count, 0, size, to, size);
        if (w->bias != nullptr)
          for (int m = 0; m < count; m++) floats().add(to + static_cast<size_t>(m) * size, w->bias + first, size);
      }
      for (int m = 0; m < count; m++) {
        const size_t own = static_cast<size_t>(m) * size;
        floats().gate(Gate::silu, gates + own, ups + own, size, y + static_cast<size_t>(begin + m) * gate.rows + first);
      }
    });
  });
}

namespace {

// Weights are multiplied as they are packed, by activations in integers.
void multiply_packed(const std::vector<Product>& products, const float* x, int count) {
  const int columns = products[0].w->columns;
  std::vector<Product> left = products;
  while (!left.empty()) {  // once, as a rule: groups are all of one size
    const int group = left[0].w->packed.group;
    const auto others = std::stable_partition(left.begin(), left.end(),
                                              [&](const Product& product) { return product.w->packed.group == group; });
    QuantisedRows rows(count, columns, group);
    each_token(count, [&](int row) { rows.put(row, x + static_cast<size_t>(row) * columns); });
    multiply({left.begin(), others}, rows);
    left.erase(left.begin(), others);
  }
}

void multiply_plain(const std::vector<Product>& products, const float* all, int rows) {
  const std::vector<Task> tasks = divided(products);
  each_part(rows, [&](int begin, int count) {
    Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
      const auto [product, first, last] = tasks[index];
      const Matrix& w = *product->w;
      const float* x = all + static_cast<size_t>(begin) * w.columns;
      float* y = product->y + static_cast<size_t>(begin) * w.rows;
      if (w.plain != nullptr)
        dense().multiply(w.plain, x, w.columns, count, first, last, y, w.rows);
      else
        dense().multiply_half(w.half, x, w.columns, count, first, last, y, w.rows);
      add_bias(tasks[index], begin, count);
    });
  });
}

void multiply_plain_many(const std::vector<Product>& products, const float* x, int count, Sgemm sgemm) {
  constexpr int kRowMajor = 101, kAsIs = 111, kTransposed = 112;
  std::vector<Task> tasks;
  for (const Product& product : products) divide(product, kPanel, tasks);
  Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
    const Task& task = tasks[index];
    const Matrix& w = *task.product->w;
    const size_t begin = static_cast<size_t>(task.first) * w.columns;
    const float* panel = w.plain + begin;
    static thread_local std::vector<float> wide;
    if (w.plain == nullptr) {
      wide.resize(std::max(wide.size(), static_cast<size_t>(task.last - task.first) * w.columns));
      dense().widen(w.half, begin, static_cast<size_t>(task.last - task.first) * w.columns, wide.data());
      panel = wide.data();
    }
    sgemm(kRowMajor, kAsIs, kTransposed, count, task.last - task.first, w.columns, 1.0f, x, w.columns, panel, w.columns,
          0.0f, task.product->y + task.first, w.rows);
    add_bias(task, 0, count);
  });
}

}  // namespace

void use_blas(Sgemm sgemm) { blas = sgemm; }

Sgemm named_blas() { return blas.load(); }

void use_one_path(bool one) { one_path = one; }

bool takes_one_path() { return one_path || wide() == nullptr; }

bool may_go_wide() { return !takes_one_path(); }

Rounded::Rounded(const Wide& use, int count, int columns)
    : use(use), count_(count), columns_(columns), values_(wide_size(count, columns)) {
  const size_t whole = static_cast<size_t>(count) / kWideTile * kWideTile * columns;
  std::fill(values_.data() + whole, values_.data() + wide_size(count, columns), 0);
}

const Wide* wide_for(int count) { return may_go_wide() && count > kMany ? wide() : nullptr; }

namespace {

// Rows of weights that are one task, where `all` are to be multiplied.
int panel_of(int all, int columns) {
  const int share = all / (Pool::shared().threads() * kTasksPerThread) / kLeastPanel * kLeastPanel;
  const int most = static_cast<int>(kPanelBytes / (sizeof(uint16_t) * columns)) / kLeastPanel * kLeastPanel;
  return std::clamp(share, kLeastPanel, std::clamp(most, kLeastPanel, kWideMost));
}

uint16_t* panel_room(int rows, int columns) {
  static thread_local Room<uint16_t> room;
  return room.at_least(wide_size(rows, columns));
}

}  // namespace

void multiply(const std::vector<Product>& products, const Rounded& x, bool adds) {
  const int columns = x.rows().columns;
  int all = 0;
  for (const Product& product : products) all += product.w->rows;
  std::vector<Task> tasks;
  for (const Product& product : products) divide(product, panel_of(all, columns), tasks);
  Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
    const Task& task = tasks[index];
    const Matrix& w = *task.product->w;
    x.use.multiply({w.packed, w.bias, task.first, task.last}, x.rows(), panel_room(task.last - task.first, columns), adds,
                   task.product->y, w.rows);
  });
}

void multiply_gated(const Matrix& gate, const Matrix& up, const Rounded& x, Rounded& y) {
  const int columns = x.rows().columns, size = panel_of(2 * gate.rows, columns) / 2;
  Pool::shared().each((gate.rows + size - 1) / size, [&](int index) {
    const int first = index * size, last = std::min(first + size, gate.rows);
    x.use.multiply_gated({gate.packed, gate.bias, first, last}, {up.packed, up.bias, first, last}, x.rows(),
                         panel_room(2 * (last - first), columns), y.rows());
  });
}

namespace {

void multiply_wide(const std::vector<Product>& products, const float* x, int count, const Wide& use) {
  const int columns = products[0].w->columns;
  Rounded rounded(use, count, columns);
  each_token(count, [&](int row) { rounded.put(row, x + static_cast<size_t>(row) * columns); });
  multiply(products, rounded);
}

// What may be used for so many rows; null where nothing else is than for few.
struct Paths {
  Sgemm sgemm;
  const Wide* wide;
};

void multiply_with(const std::vector<Product>& products, const float* x, int count, Paths paths) {
  std::vector<Product> packed, plain;
  for (const Product& product : products) (product.w->is_packed() ? packed : plain).push_back(product);
  if (!packed.empty() && paths.wide != nullptr)
    multiply_wide(packed, x, count, *paths.wide);
  else if (!packed.empty())
    multiply_packed(packed, x, count);
  if (plain.empty()) return;
  if (count > kFew && paths.sgemm != nullptr)
    multiply_plain_many(plain, x, count, paths.sgemm);
  else
    multiply_plain(plain, x, count);
}

}  // namespace

void multiply(const std::vector<Product>& products, const float* x, int count) {
  multiply_with(products, x, count, takes_one_path() ? Paths{} : Paths{blas.load(), wide_for(count)});
}

void multiply_one_path(const std::vector<Product>& products, const float* x, int count) {
  multiply_with(products, x, count, Paths{});
}

}  // namespace ingot
