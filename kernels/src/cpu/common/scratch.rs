//! Working memory of one thread, kept from call to call.

use std::cell::RefCell;

/// A cache line. Vectors loaded across two lines cost twice.
#[derive(Clone, Copy)]
#[repr(align(64))]
#[expect(dead_code, reason = "read and written through a pointer")]
struct Line([f32; LINE]);

const LINE: usize = 16;

/// `f32`s that start on a cache line. What they hold at first is whatever they held last.
#[derive(Default)]
pub(crate) struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    pub fn at_least(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(LINE);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; LINE]));
        }
        // SAFETY: a line is LINE f32s without padding, and `lines` of them are there.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), lines * LINE) }
    }
}

/// The buffers of the kernels; their layouts stand where they are used.
#[derive(Default)]
pub(crate) struct Scratch {
    pub queries: Buffer,
    pub outputs: Buffer,
    pub weights: Buffer,
    pub keys: Buffer,
    pub values: Buffer,
    pub row: Buffer,
    pub masks: Vec<u64>,
}

/// Lends the thread's scratch. Kernels do not nest, so it is always there.
pub(in crate::cpu) fn with<R>(use_it: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    SCRATCH.with(|scratch| use_it(&mut scratch.borrow_mut()))
}
