// Programmatic dependent launch (PDL): a kernel starts while the kernel in front of it on the stream still runs, and
// waits for that one where it needs its results.
#pragma once

namespace pagoda {

// The kernel behind this one on the stream may start as soon as every block has called this or ended, if it was
// launched for that (`Function::launch_dependent` of src/cuda/common/module.rs).
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel in front of this one on the stream has ended, and its writes are visible.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The start of a kernel that waits before everything else. The next kernel on the stream may start meanwhile. Chips
// before sm_90 have no PDL, and the launcher does not ask for it there.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    wait_for_previous();
#endif
}

}  // namespace pagoda
