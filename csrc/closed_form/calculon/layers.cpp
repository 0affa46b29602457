// Operations of one block as rows of figures: FLOP, bytes and seconds of every stage, the
// collective, and the tensors. For a single execution that a user inspects; block.cpp sums the same
// operations without storing them.
#include <limits>

#include "closed_form/calculon/calculon.hpp"
#include "closed_form/calculon/operations.hpp"
#include "closed_form/calculon/passes.hpp"
#include "closed_form/calculon/timing.hpp"

namespace autopar::analytic::calculon {
namespace {

// One operation in one stage.
struct Row {
  double flops = 0, bytes = 0, tiles = 1;
  Timing timing;

  double intensity() const {
    if (flops == 0.0) return 0.0;
    return bytes == 0.0 ? std::numeric_limits<double>::infinity() : flops / bytes;
  }
  double processing_s() const { return timing.processing_s[kBase]; }
  double size(int j) const { return timing.links[j].bytes; }
  double tile(int j) const { return size(j) / tiles; }  // of one step of an overlapped collective
  double link_s(int j) const { return timing.links[j].seconds; }
  double exposed_s(int j) const { return timing.exposed_s[j]; }
};

// One operation; inputs and outputs in elements, tensors in bytes.
struct Operation {
  double inputs = 0, outputs = 0;
  Row fw, agrad, wgrad, optim;
  double weight = 0, activation = 0, weight_gradient = 0, activation_gradient = 0, optimizer = 0;
};

// Passes every figure with its name to `put`, in the published order.
template <class Put>
void put_figures(const Operation& o, Put put) {
  const Row &fw = o.fw, &agrad = o.agrad, &wgrad = o.wgrad, &optim = o.optim;
  put("inputs_size", o.inputs);
  put("outputs_size", o.outputs);
  put("fw_flops", fw.flops);
  put("fw_mem_accessed", fw.bytes);
  put("fw_arithmetic_intensity", fw.intensity());
  put("fw_processing_time", fw.processing_s());
  put("baseblock_fw_tp_comm_tile", fw.tile(kBase));
  put("edgeblock_fw_tp_comm_tile", fw.tile(kEdge));
  put("baseblock_fw_tp_comm_size", fw.size(kBase));
  put("edgeblock_fw_tp_comm_size", fw.size(kEdge));
  put("baseblock_fw_tp_comm_time", fw.link_s(kBase));
  put("edgeblock_fw_tp_comm_time", fw.link_s(kEdge));
  put("baseblock_fw_tp_comm_time_exposed", fw.exposed_s(kBase));
  put("edgeblock_fw_tp_comm_time_exposed", fw.exposed_s(kEdge));
  put("agrad_flops", agrad.flops);
  put("agrad_mem_accessed", agrad.bytes);
  put("agrad_arithmetic_intensity", agrad.intensity());
  put("agrad_processing_time", agrad.processing_s());
  put("baseblock_bw_tp_comm_tile", agrad.tile(kBase));
  put("edgeblock_bw_tp_comm_tile", agrad.tile(kEdge));
  put("baseblock_bw_tp_comm_size", agrad.size(kBase));
  put("edgeblock_bw_tp_comm_size", agrad.size(kEdge));
  put("baseblock_bw_tp_comm_time", agrad.link_s(kBase));
  put("edgeblock_bw_tp_comm_time", agrad.link_s(kEdge));
  put("baseblock_bw_tp_comm_time_exposed", agrad.exposed_s(kBase));
  put("edgeblock_bw_tp_comm_time_exposed", agrad.exposed_s(kEdge));
  put("wgrad_flops", wgrad.flops);
  put("wgrad_mem_accessed", wgrad.bytes);
  put("wgrad_arithmetic_intensity", wgrad.intensity());
  put("wgrad_processing_time", wgrad.processing_s());
  put("baseblock_recomm_tile", wgrad.tile(kBase));
  put("edgeblock_recomm_tile", wgrad.tile(kEdge));
  put("baseblock_recomm_size", wgrad.size(kBase));
  put("edgeblock_recomm_size", wgrad.size(kEdge));
  put("baseblock_recomm_time", wgrad.link_s(kBase));
  put("edgeblock_recomm_time", wgrad.link_s(kEdge));
  put("baseblock_recomm_time_exposed", wgrad.exposed_s(kBase));
  put("edgeblock_recomm_time_exposed", wgrad.exposed_s(kEdge));
  put("optim_flops", optim.flops);
  put("optim_mem_accessed", optim.bytes);
  put("optim_arithmetic_intensity", optim.intensity());
  put("optim_processing_time", optim.processing_s());
  put("weight", o.weight);
  put("activation", o.activation);
  put("weight_grad", o.weight_gradient);
  put("activation_grad", o.activation_gradient);
  put("optimizer", o.optimizer);
}

// Creates a row for every operation, for training and for inference.
class Table {
 public:
  Table(const Shape& shape, const Quirks& quirks, const System& system, const Execution& x)
      : s_(shape), q_(quirks), timings_(shape, quirks, system, x) {}

  std::vector<Layer> run() {
    Operations(s_, q_, *this).run();
    return std::move(layers_);
  }

  struct Known {
    Kind kind;
    Flags flags;
  };
  Known price(const Kind& k, const Flags& f) const { return {k, f}; }
  void add(Name name, const Known& known) { add(name, known.kind, known.flags); }
  void add(Name name, const Kind& k, const Flags& f) {
    Operation o;
    o.inputs = k.inputs;
    o.outputs = k.outputs;
    o.fw = row(k, f, kFw, k.fw_flops, timings_.fw_bytes(k));
    o.agrad = row(k, f, kAgrad, k.agrad_flops, timings_.agrad_bytes(k));
    o.wgrad = row(k, f, kWgrad, k.wgrad_flops, timings_.wgrad_bytes(k));
    const OptimizerStep step = optimizer_step(s_, q_, k.parameters);
    o.optim = {step.flops, step.bytes, 1, by_itself(timings_.optimizer(step))};
    o.weight = k.parameters * s_.element_bytes;
    o.activation = timings_.activation_bytes(k);
    o.weight_gradient = step.gradient_bytes;
    o.activation_gradient = timings_.gradient_bytes(k);
    o.optimizer = step.bytes;
    Layer& layer = layers_.emplace_back(Layer{std::string(name.half) + name.rest, {}});
    std::size_t count = 0;
    put_figures(o, [&](const char*, double value) { layer.figures.at(count++) = value; });
  }

 private:
  Row row(const Kind& k, const Flags& f, Stage stage, double flops, double bytes) const {
    const double tiles = k.role != kComputes && k.matrix ? s_.tensor : 1;
    return {flops, bytes, tiles,
            k.role == kComputes ? by_itself(timings_.alone(k, flops, bytes))
                                : timings_.time(k, stage, flops, bytes, f.recommunicated)};
  }
  static Timing by_itself(const Alone& alone) {
    return {alone, {alone.alone_s, alone.alone_s}, {0, 0}, {}};
  }

  const Shape& s_;
  const Quirks& q_;
  Timings timings_;
  std::vector<Layer> layers_;
};

}  // namespace

std::array<const char*, kNumLayerFigures> layer_figure_names() {
  std::array<const char*, kNumLayerFigures> names{};
  std::size_t count = 0;
  put_figures({}, [&](const char* name, double) { names.at(count++) = name; });
  return names;
}

std::vector<Layer> Model::layers(const Execution& x) const {
  const Shape s = shape(x);
  return Table(s, quirks_, system_, x).run();
}

}  // namespace autopar::analytic::calculon
