// Programmatic dependent launch: a kernel starts while the kernel in front of it on the stream still runs.
#pragma once

namespace pagoda {

// The kernel behind this one on the stream may begin as soon as every block has come here or ended; it was launched for
// that (`Function::follow` of src/cuda/module.rs).
__device__ inline void let_follow() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the kernel before this one on the stream has ended, with all that it has written.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The beginning of a kernel that waits with all it does; the next one on the stream may come here meanwhile. Chips before sm_90
// begin a kernel when the one before it has ended, and the launcher asks for nothing else there.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
    let_follow();
    wait_for_previous();
#endif
}

}  // namespace pagoda
