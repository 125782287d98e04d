package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"unsafe"
)

// Provider is the execution provider: where a model runs.
type Provider int32

// Where a model runs.
const (
	ProviderAuto Provider = C.PAGODA_PROVIDER_AUTO // On a GPU where there is one, else on the CPU.
	ProviderCPU  Provider = C.PAGODA_PROVIDER_CPU  // On the CPU.
	ProviderCUDA Provider = C.PAGODA_PROVIDER_CUDA // On an NVIDIA GPU, or not at all.
)

// Optimization is how far ONNX Runtime optimizes the graph when a model is opened.
type Optimization int32

// How far the graph is optimized.
const (
	OptimizationAll      Optimization = C.PAGODA_OPTIMIZATION_ALL      // Everything that ONNX Runtime can do.
	OptimizationNone     Optimization = C.PAGODA_OPTIMIZATION_NONE     // Nothing.
	OptimizationBasic    Optimization = C.PAGODA_OPTIMIZATION_BASIC    // What keeps the graph standard ONNX.
	OptimizationExtended Optimization = C.PAGODA_OPTIMIZATION_EXTENDED // Fusions too, but not of memory layouts.
)

// ModelOptions is how to open a model.
type ModelOptions struct {
	// Provider is where the model runs.
	Provider Provider
	// DeviceID is the number of the GPU.
	DeviceID int32
	// IntraOpThreads is the number of threads that work on one run; 0: one for each core.
	IntraOpThreads int32
	// Optimization is how far the graph is optimized.
	Optimization Optimization
	// SleepWhenIdle lets idle threads sleep. Otherwise they spin for a while after each run, which takes cores from
	// everything else in the process.
	SleepWhenIdle bool
	// TF32 lets f32 matrix products on a GPU use TF32, which keeps 10 bits of the fraction and is several times as fast.
	TF32 bool
	// HostPools keeps the ai.pagoda operators on the CPU even if the rest of the model runs on a GPU, so that pools of
	// keys and values in host memory are used in place.
	HostPools bool
	// ONNXRuntimePath is the ONNX Runtime library; "": search for it. A process loads one, for its first model.
	ONNXRuntimePath string
	// ProfilePath is where a profile of all runs is written when the model is closed; "": no profile.
	ProfilePath string
	// Tables has the tables that EmbeddingBag nodes of the graph name. The model keeps them open.
	Tables *Embeddings
}

// Model is an open model.
type Model struct{ object *object }

var modelKind = &kind{"model", func(token uintptr) C.pagoda_status {
	return C.pagoda_model_free(modelHandle(token))
}}

func modelHandle(token uintptr) *C.pagoda_model { return *(**C.pagoda_model)(unsafe.Pointer(&token)) }

// OpenModel opens the model in an .onnx file. The ai.pagoda operators are always available.
func OpenModel(ctx context.Context, path string, options *ModelOptions) (*Model, error) {
	cPath, err := text(path, "path")
	if err != nil {
		return nil, err
	}
	return openModel(ctx, options, func(options *C.pagoda_model_options, handle **C.pagoda_model,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_model_open(cPath, options, handle, failure)
	})
}

// OpenModelMemory opens a model from the bytes of an .onnx file; they are copied.
func OpenModelMemory(ctx context.Context, bytes []byte, options *ModelOptions) (*Model, error) {
	bytes = lasting(ctx, bytes)
	return openModel(ctx, options, func(options *C.pagoda_model_options, handle **C.pagoda_model,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_go_model_open_memory((*C.uint8_t)(first(bytes)), C.size_t(len(bytes)), options, handle, failure)
	})
}

func openModel(ctx context.Context, options *ModelOptions,
	open func(*C.pagoda_model_options, **C.pagoda_model, **C.pagoda_error) C.pagoda_status) (*Model, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	options, made := copied(options), callers()
	return await(ctx, func() (*Model, error) {
		var l lent
		defer l.Unpin()
		cOptions, err := options.toC(&l)
		if err != nil {
			return nil, err
		}
		var handle *C.pagoda_model
		var failure *C.pagoda_error
		if err := check(open(cOptions, &handle, &failure), &failure); err != nil {
			return nil, err
		}
		m := new(Model)
		m.object = own(m, modelKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		runtime.KeepAlive(options)
		return m, nil
	}, func(m *Model) { m.Close() })
}

func (o *ModelOptions) toC(l *lent) (*C.pagoda_model_options, error) {
	c, f := C.pagoda_model_options_init(), &fields{lent: l}
	c.provider = C.pagoda_provider(o.Provider)
	c.device_id = C.int32_t(o.DeviceID)
	c.intra_op_threads = C.int32_t(o.IntraOpThreads)
	c.optimization = C.pagoda_optimization(o.Optimization)
	c.sleep_when_idle, c.tf32, c.host_pools = flag(o.SleepWhenIdle), flag(o.TF32), flag(o.HostPools)
	f.text(&c.onnxruntime_path, o.ONNXRuntimePath, "options.onnxruntime_path")
	f.text(&c.profile_path, o.ProfilePath, "options.profile_path")
	if o.Tables != nil && f.err == nil {
		c.tables, f.err = o.Tables.handle("options.tables")
	}
	return &c, f.err
}

// Provider is where the model runs, and why [ProviderAuto] chose the CPU; "" in all other cases.
func (m *Model) Provider() (provider Provider, reason string, err error) {
	handle, err := m.hold()
	if err != nil {
		return 0, "", err
	}
	defer m.object.mu.RUnlock()
	var found C.pagoda_provider
	var why *C.char
	var failure *C.pagoda_error
	if err := check(C.pagoda_model_provider(handle, &found, &why, &failure), &failure); err != nil {
		return 0, "", err
	}
	return Provider(found), C.GoString(why), nil
}

// ValueInfo is an input or an output of a model.
type ValueInfo struct {
	// Name is its name.
	Name string
	// Type is the type of its elements; [Undefined] if it is not a tensor.
	Type ElementType
	// Dims is its dimensions, -1 where one is free; nil if the model does not even say how many there are.
	Dims []int64
	// Symbols is for each dimension the name of its symbol; "" where it is fixed or has none.
	Symbols []string
}

// Inputs is what goes in.
func (m *Model) Inputs() ([]ValueInfo, error) {
	return m.infos(
		func(handle *C.pagoda_model, count *C.size_t, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_model_input_count(handle, count, failure)
		},
		func(handle *C.pagoda_model, i C.size_t, info *C.pagoda_value_info, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_model_input(handle, i, info, failure)
		})
}

// Outputs is what comes out.
func (m *Model) Outputs() ([]ValueInfo, error) {
	return m.infos(
		func(handle *C.pagoda_model, count *C.size_t, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_model_output_count(handle, count, failure)
		},
		func(handle *C.pagoda_model, i C.size_t, info *C.pagoda_value_info, failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_model_output(handle, i, info, failure)
		})
}

func (m *Model) infos(count func(*C.pagoda_model, *C.size_t, **C.pagoda_error) C.pagoda_status,
	info func(*C.pagoda_model, C.size_t, *C.pagoda_value_info, **C.pagoda_error) C.pagoda_status) ([]ValueInfo, error) {
	handle, err := m.hold()
	if err != nil {
		return nil, err
	}
	defer m.object.mu.RUnlock()
	var n C.size_t
	var failure *C.pagoda_error
	if err := check(count(handle, &n, &failure), &failure); err != nil {
		return nil, err
	}
	infos := make([]ValueInfo, n)
	for i := range infos {
		c := C.pagoda_value_info_init()
		if err := check(info(handle, C.size_t(i), &c, &failure), &failure); err != nil {
			return nil, err
		}
		infos[i] = ValueInfo{Name: C.GoString(c.name), Type: ElementType(c._type)}
		if c.dims != nil {
			infos[i].Dims = append([]int64{}, unsafe.Slice((*int64)(c.dims), c.rank)...)
			for _, symbol := range unsafe.Slice(c.symbols, c.rank) {
				infos[i].Symbols = append(infos[i].Symbols, C.GoString(symbol))
			}
		}
	}
	return infos, nil
}

// Close closes the model. Runs that are in progress end normally.
func (m *Model) Close() error { return m.it().close() }

func (m *Model) it() *object {
	if m == nil {
		return nil
	}
	return m.object
}

func (m *Model) handle() (*C.pagoda_model, error) {
	token, err := m.it().get("model")
	return modelHandle(token), err
}

func (m *Model) hold() (*C.pagoda_model, error) {
	token, err := m.it().hold("model")
	return modelHandle(token), err
}
