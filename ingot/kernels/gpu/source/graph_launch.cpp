// An operation of MLX that launches a CUDA graph of ours on MLX's own stream: in order with everything before and
// behind it, so that neither the host nor a kernel waits for anything.
//
// It is compiled where it is used (cuda_graph.py) against the headers of the MLX that is installed there, with any
// C++ compiler. Those headers name some of CUDA's types and a library for messages. Neither is called here, and neither
// is always installed, so the declarations below stand in for both. They are complete for what the headers use.

#include <cassert>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <dlfcn.h>

using CUresult = int;
using cudaError_t = int;
struct CUstream_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUfunc_st;
struct CUmemPoolHandle_st;
struct CUDA_KERNEL_NODE_PARAMS_v2_st;
struct cudaKernelNodeParams;
using cudaStream_t = CUstream_st*;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;
using cudaGraphNode_t = CUgraphNode_st*;
using cudaMemPool_t = CUmemPoolHandle_st*;
using CUgraphNode = CUgraphNode_st*;
using CUfunction = CUfunc_st*;
using CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2_st;
struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
template <typename... T>
int cuOccupancyMaxPotentialBlockSize(T...);
template <typename... T>
int cudaOccupancyMaxPotentialBlockSize(T...);
namespace fmt {
template <typename... T>
std::string format(T&&...);
}

#include <mlx/backend/cuda/device.h>
#include <mlx/mlx.h>
#include <mlx/primitives.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

namespace mx = mlx::core;
namespace nb = nanobind;

namespace {

// What is called of the driver, which MLX has loaded already.
struct Driver {
  CUresult (*launch)(cudaGraphExec_t, cudaStream_t);
  CUresult (*destroy)(cudaGraphExec_t);

  static const Driver& get() {
    static const Driver driver{find<decltype(launch)>("cuGraphLaunch"), find<decltype(destroy)>("cuGraphExecDestroy")};
    return driver;
  }

  template <typename Function>
  static Function find(const char* name) {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    void* found = library == nullptr ? nullptr : dlsym(library, name);
    if (found == nullptr) {
      throw std::runtime_error(std::string(name) + " is not found in libcuda.so.1");
    }
    return reinterpret_cast<Function>(found);
  }
};

// An instantiated graph. Launches that are still to be evaluated own it too. The driver lets one that runs finish.
class Graph {
 public:
  explicit Graph(std::uintptr_t handle) : driver_(Driver::get()), handle_(reinterpret_cast<cudaGraphExec_t>(handle)) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    driver_.destroy(handle_);
  }

  void launch(cudaStream_t stream) const {
    if (CUresult result = driver_.launch(handle_, stream); result != 0) {
      throw std::runtime_error("cuGraphLaunch: CUDA error " + std::to_string(result));
    }
  }

 private:
  const Driver& driver_;
  cudaGraphExec_t handle_;
};

class GraphLaunch : public mx::Primitive {
 public:
  GraphLaunch(mx::Stream stream, std::shared_ptr<Graph> graph) : Primitive(stream), graph_(std::move(graph)) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("A CUDA graph is launched on a GPU alone.");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cu::get_command_encoder(stream());
    encoder.commit(); // MLX gathers kernels in a graph of its own: what came before is launched before
    graph_->launch(encoder.stream());
    outputs[0].copy_shared_buffer(inputs[0]);
  }

  const char* name() const override {
    return "GraphLaunch";
  }

 private:
  std::shared_ptr<Graph> graph_;
};

// The same array as `before`, for whatever comes behind the graph.
mx::array launch(std::shared_ptr<Graph> graph, const mx::array& before) {
  auto primitive = std::make_shared<GraphLaunch>(mx::default_stream(mx::Device::gpu), std::move(graph));
  return mx::array(before.shape(), before.dtype(), std::move(primitive), {before});
}

} // namespace

NB_MODULE(ingot_graph_launch, module) {
  nb::class_<Graph>(module, "Graph").def(nb::init<std::uintptr_t>());
  module.def("launch", &launch, nb::arg("graph"), nb::arg("before"));
}
