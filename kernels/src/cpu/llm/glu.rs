//! `Glu` on the CPU.

use std::ops::Range;

use crate::common::parallel::{Parallel, run_once};
use crate::cpu::Isa;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::{Element, Glu, GluActivation, InputError};

/// Outputs that one task computes: a few microseconds.
const TASK: usize = if cfg!(miri) { 96 } else { 16 << 10 };
/// Outputs between a conversion to f32 and the one back: gates and ups stay in the first-level cache. A multiple of the lanes
/// of every instruction set.
const BLOCK: usize = if cfg!(miri) { 32 } else { 1024 };

compiled! {
    /// An element type that [`Glu`] is compiled for.
    pub trait GluElement {
        fn glu(op: &Glu<'_, Self>, isa: Isa, y: &mut [Self], parallel: &dyn Parallel) -> Result<(), InputError>;
    }
}

impl<T: GluElement> Glu<'_, T> {
    /// Checks, then computes `y` (`[T, F]`) with the best instruction set. After an error it is as it was.
    pub fn run(&self, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets, and within one set
    /// depend on nothing but its gate and its up.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::glu(self, isa, y, parallel)
    }
}

fn glu<T: Element>(op: &Glu<'_, T>, isa: Isa, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
    op.check(y.len())?;
    let work = Outputs { op, len: y.len(), y: Shared(y.as_mut_ptr()) };
    // SAFETY: the set is available; each task runs once, on outputs of its own.
    run_once(parallel, y.len().div_ceil(TASK), &|task| unsafe { run_on(isa, &work, task) });
    Ok(())
}

/// The outputs of a call, in tasks of [`TASK`]: by number and not by row, so that one long row has several threads.
struct Outputs<'a, T> {
    op: &'a Glu<'a, T>,
    len: usize,
    y: Shared<T>,
}

impl<T: Element> Work for Outputs<'_, T> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (mut at, end) = (task * TASK, self.len.min((task + 1) * TASK));
        while at < end {
            let (row, column) = (at / self.op.width, at % self.op.width);
            let columns = column..self.op.width.min(column + (end - at).min(BLOCK));
            at += columns.len();
            // SAFETY: the caller's; these outputs are in no other task.
            unsafe { self.block::<S>(row, columns, scratch) };
        }
    }
}

impl<T: Element> Outputs<'_, T> {
    /// # Safety
    /// The CPU has the instructions of `S`; no other task has these outputs, at most [`BLOCK`] of them.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, row: usize, columns: Range<usize>, scratch: &mut Scratch) {
        let Glu { width, x, activation, .. } = *self.op;
        let (gates, ups) = x[row * 2 * width..][..2 * width].split_at(width);
        let count = columns.len();
        let (gate, up) = scratch.row.at_least(2 * BLOCK).split_at_mut(BLOCK);
        // SAFETY: the caller's; the output has a row of `width` for each row of x.
        unsafe {
            T::widen::<S>(&gates[columns.clone()], &mut gate[..count]);
            T::widen::<S>(&ups[columns.clone()], &mut up[..count]);
            gated::<S>(activation, gate, up, count);
            let y = std::slice::from_raw_parts_mut(self.y.pointer().add(row * width + columns.start), count);
            T::narrow::<S>(&gate[..count], y);
        }
    }
}

/// The first `count` gates become `activation(gate) · up`. Whole vectors are computed, the last one too, so that a number does
/// not depend on where it lies: the buffers are a multiple of the lanes, and what is behind the last number is not used.
///
/// # Safety
/// As for [`multiply`].
#[inline(always)]
pub(super) unsafe fn gated<S: Simd>(activation: GluActivation, gate: &mut [f32], up: &[f32], count: usize) {
    // SAFETY: the caller's.
    unsafe {
        match activation {
            GluActivation::Silu => multiply::<S, Silu>(gate, up, count),
            GluActivation::Gelu => multiply::<S, Gelu>(gate, up, count),
            GluActivation::GeluTanh => multiply::<S, GeluTanh>(gate, up, count),
        }
    }
}

/// A function of a gate. Not a closure, which does not get the instructions of the function around it: each of its own would be a
/// call.
trait Activation {
    /// # Safety
    /// The CPU has the instructions of `S`. Implementations are `inline(always)`.
    unsafe fn of<S: Simd>(x: S::V) -> S::V;
}

struct Silu;
struct Gelu;
struct GeluTanh;

impl Activation for Silu {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::silu(x) }
    }
}

impl Activation for Gelu {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: the caller's.
        unsafe { gelu::<S>(x) }
    }
}

impl Activation for GeluTanh {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: the caller's.
        unsafe { gelu_tanh::<S>(x) }
    }
}

/// The first `count` gates become `activation(gate) · up`.
///
/// # Safety
/// The CPU has the instructions of `S`; both buffers hold `count` numbers, rounded up to whole vectors.
#[inline(always)]
unsafe fn multiply<S: Simd, A: Activation>(gate: &mut [f32], up: &[f32], count: usize) {
    for at in (0..count).step_by(S::LANES) {
        // SAFETY: the caller's.
        unsafe {
            let to = gate.as_mut_ptr().add(at);
            S::store(to, S::mul(A::of::<S>(S::load(to)), S::load(up.as_ptr().add(at))));
        }
    }
}

/// `x · Φ(x)`, to 4e-7 of its value for x above -3, and to x² · 1e-7 below. `Φ(-|x|) = e^(-x²/2) · t · P(t)` with
/// `t = 1 / (1 + c·|x|)`, which is smooth where Φ itself falls to nothing.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn gelu<S: Simd>(x: S::V) -> S::V {
    /// 0.38 / √2.
    const C: f32 = 0.268_700_58;
    /// P, fitted for the smallest relative error, 2e-8; lowest power first.
    const P: [f32; 9] = [
        0.107_204_795,
        0.106_970_49,
        0.101_881_79,
        0.069_585_35,
        0.114_440_15,
        -0.079_949_23,
        0.181_284_76,
        -0.130_843_03,
        0.029_424_93,
    ];
    const HALF_LOG2_E: f32 = std::f32::consts::LOG2_E / 2.0;
    // SAFETY: the caller's.
    unsafe {
        let one = S::splat(1.0);
        // In this order NaN stays.
        let size = S::max(S::mul(x, S::splat(-1.0)), x);
        let t = S::div(one, S::fma(size, S::splat(C), one));
        let mut p = S::splat(P[8]);
        for power in (0..8).rev() {
            p = S::fma(p, t, S::splat(P[power]));
        }
        let square = S::mul(S::mul(x, S::splat(-HALF_LOG2_E)), x);
        let below = S::mul(S::mul(p, t), S::exp2(square));
        let above = S::fma(below, S::splat(-1.0), one);
        let (least, zero) = (S::splat(f32::NEG_INFINITY), S::splat(0.0));
        S::mul(x, S::select_within(x, least, zero, below, above))
    }
}

/// `x / (1 + e^(-2u))`, `u = √(2/π) · (x + 0.044715·x³)`: the same as `x / 2 · (1 + tanh u)`, without its cancellation.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn gelu_tanh<S: Simd>(x: S::V) -> S::V {
    /// `2 · √(2/π) · log2(e)`.
    const LINEAR: f32 = 2.302_208_2;
    const CUBIC: f32 = LINEAR * 0.044_715;
    // SAFETY: the caller's.
    unsafe {
        let square = S::mul(x, x);
        let exponent = S::mul(x, S::fma(square, S::splat(CUBIC), S::splat(LINEAR)));
        // No further than `exp2` goes; in this order NaN stays.
        let exponent = S::max(S::splat(-126.0), exponent);
        let divisor = S::add(S::exp2(S::mul(exponent, S::splat(-1.0))), S::splat(1.0));
        S::div(x, divisor)
    }
}
